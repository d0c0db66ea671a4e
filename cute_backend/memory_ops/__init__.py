"""From a plan to the text of a kernel: CuTe DSL Python, and the library that it imports.

`emit.emit` writes the module. The text depends on nothing but its arguments.
"""
