"""Helpers of tests. A test module imports its helpers from here, and never another test module.

- Programs and operands: `epilogues`, `heavy`, `modes`, `random_specs`, `small_specs`, `op_samples`, `draws`,
  `experts`, `torchao_mx`, `model_files`, `operator_cases`, `packages`.
- References: `reference`, `independent`, `float_formats`, `device_check`, `device_rows`, `traffic`,
  `inductor_model`.
- Kernels: `golden`, `golden_regions`, `shipped`, `kernel_check`, `memcheck`, `archs`, `bare_epilogue`.
- Pages and results: `page_commands`, `colours`, `sample_results`.
- Plugins of pytest: `compile_once`, `cpp_once`, `cpu_times`, `quiet_torch`, `sweeps`. Processes of one group:
  `ranks`.
- Folders: `fx_walk` makes graphs and reads recorded ones. `runtime` has a kernel made by hand, and programs
  that tests start. `simulator` has small PTX kernels, exact products, and planted faults: `planting`
  plants them, `mutants` has the kernels that they are planted in, and `mutants_sm80`, `mutants_sm90` and
  `mutants_sm100` are the tables of faults.
"""
