"""The kinds of things that an epilogue is made of: each is one object.

- `reductions/`: how elements are combined, and `axis.py` in which elements: rows, columns, the whole plane.
- `blocks/`: the ops that depend on blocks of columns: their reductions, rotations, and numbers of parts.
- `scales/`: the vectors beside A and B of a product: scales of blocks, scales and zeros of groups of K.
- `stored.py`: the formats of weights that are converted as they are multiplied.
- `loads.py`: the operands, by the axes along which they vary; `tables.py`: those that vary in blocks.
- `results/`: the forms in which values are stored: planes, by heads or in a cache, and values of blocks;
  `forms.py` lists them.
- `axes.py`: the axes of arguments, in the words of which loads and results say what theirs are.

An object holds all that a kind means. The layers above iterate over the objects, or ask those of a spec. Of
these layers, only those that make one of a kind know it by name: the walker, which finds it in a program. No
file here imports CUTLASS, a graph or a kernel.
"""
