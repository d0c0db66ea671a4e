"""The kinds of things that an epilogue is made of: each is one object in a file of its own.

An object holds all that a kind means. The layers above iterate over the objects, or ask those of a spec; none
knows a kind by name. No file here imports CUTLASS, a graph or a kernel.
"""
