"""Helpers of tests. A test module imports its helpers from here, and never another test module.

- Programs and operands: `epilogues`, `heavy`, `modes`, `random_specs`, `small_specs`, `op_samples`, `draws`.
- References: `reference`, `independent`, `float_formats`, `device_check`, `device_rows`, `traffic`.
- Kernels: `golden`, `golden_regions`, `shipped`, `kernel_check`, `memcheck`.
- Plugins of pytest: `compile_once`, `cpu_times`, `sweeps`.
- Folders: `fx_walk` makes graphs and reads recorded ones; `runtime` has a kernel made by hand, and programs
  that tests start; `simulator` has small PTX kernels, exact products and planted faults.
"""
