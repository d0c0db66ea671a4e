"""Times programs on this machine's GPU, compiled by cute and by its alternatives: `python -m cute_backend
bench`.

`table` defines tables; `scaled_mm`, `decoding`, `row_maxima`, `gated`, `block_scaled` and `grouped` are the
built-in ones. `timing` has the method and the reasons for it; `measure` runs tables, and `host` times calls.
`results` are plain data, which `show` and `picture` present. `command` is the entry point from the shell and
from Python. `models`, `model_case`, `model_run` and `model_results` time whole models.
"""
