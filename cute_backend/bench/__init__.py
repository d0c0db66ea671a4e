"""Times programs on the GPU that is here, beside what else could run them: `python -m cute_backend bench`.

`table` says what a table is; `scaled_mm`, `decoding`, `row_maxima`, `gated`, `block_scaled` and `grouped` are
built-in ones; `timing` is the method, with its reasons; `measure` runs tables and `host` times calls;
`results` are plain data, which `show` and `picture` present; `command` is the way in, from the shell and from
Python.
"""
