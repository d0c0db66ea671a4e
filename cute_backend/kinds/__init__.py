"""The kinds of things that an epilogue is made of: each is one object.

- `reductions/`: how elements are combined, in rows, in columns, in the whole plane and in blocks of columns.
- `blocks/`: the ops that depend on blocks of columns: their reductions, rotations, and numbers of parts.
- `loads.py`: the operands, by the axes along which they vary.
- `results/`: the memory of planes that are stored by heads, or in a cache.

An object holds all that a kind means. The layers above iterate over the objects, or ask those of a spec. Of
these layers, only those that make one of a kind know it by name: the walker, which finds it in a program, and
what decodes a spec. No file here imports CUTLASS, a graph or a kernel.
"""
