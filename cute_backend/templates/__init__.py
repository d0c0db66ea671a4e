"""GEMM kernels that an epilogue plugs into, one file for each way to multiply.

- Kernels: `sm90`, `sm100`, `sm80`, `sm120`. `gemm` has the base class of all, and `fragments` that of the
  kernels whose accumulators lie in registers. `drain` runs the epilogue on a tile, for all of them, and
  `tensor_memory` has the accumulators of `sm100`.
- The interface of epilogues: `epilogue`, `tile`, `segments`.
- Mainloops: `mainloop`, `block_scaled`, `partial_sums`, `mma_scaled`, `warp_mainloop`, `warp_columns`.
- Operands: `feed`, `tma_feed`, `warp_copies`, `cp_async`, `staged`, `block_scales`, `batch`,
  `tails`.
- The warps of a CTA: `crew`, `rings`, `stages`.
- Schedules: `scheduler`, `split_k`, `split_sums`, `overlap`.
- Reductions: `finish`, `last_tile`, `results`, `workspace`.
- Names of kernels: `entry`. Values that the compiler can't see through: `opaque`.
"""
