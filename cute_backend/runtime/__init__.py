"""The op and its implementation: compilation, the cache on disk, tuning and launches.

- Calls: `op`, `sample_op`, `launch`, `call_site`, `generated`, `bind`, `operands`, `outputs`, `counters`,
  `reach`, `device`, `flops`.
- Compilation: `kernel`, `source`, `build`, `compile`, `worker`, `host_code`, `link`, `cubin`, `toolkit`.
- Kernels on disk: `cache`, `pack`, `archive`, `upkeep`, `documents`, `space`, `trust`.
- Tuning: `tune`, `timing`, `tuning_results`, `random_operands`.
- Processes and threads: `interpreter`, `start`, `forks`.
- Messages: `notices`, `progress`.
"""
