"""Times programs on this machine's GPU, compiled by cute and by its alternatives: `python -m cute_backend
bench`.

The modules by subject:

- The entry point from the shell and from Python: `command`.
- Tables: `table` defines them; the built-in ones are `scaled_mm`, `decoding`, `losses`, `row_maxima`,
  `gated`, `block_scaled_mm`, `grouped`, `grouped_fp8`, `int8` and `weights`. `quack_peer` spells some of
  them for QuACK.
- Timing: `program_timing` has the method and the reasons for it; `measure` runs tables. `host_time` and
  `fresh` time calls and the start of a process, and `first_call` times the first calls of whole models.
- Results: `results` are plain data, which `show` and `picture` present; `environment` describes the machine.
- Whole models: `models`, `model_case`, `model_run`, `model_results`.
"""
