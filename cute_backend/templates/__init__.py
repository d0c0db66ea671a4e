"""GEMM kernels that an epilogue plugs into, one file for each way to multiply.

- Kernels: `sm90`, `sm100`, `sm80`, `sm120`. `gemm` has the base class of all, `fragments` that of the kernels
  whose accumulators lie in registers, and `tma_gemm` what those of wgmma and tcgen05 have alike.
- The epilogue of a tile: `drain`, with its sweeps, for all kernels, `tensor_memory` for accumulators there,
  `warpgroups`, and `warp_planes` and `warpgroup_planes` for what TMA moves.
- The interface of epilogues: `epilogue`, `tile`, with `fragment_tile` and `row_tile`, `segments`.
- Mainloops: `mainloop`, `block_scaled`, `converted`, `partial_sums`, `mma_scaled`, `mma_warp`,
  `warp_mainloop`, `warp_columns`, `warp_converted`. By the type of the operands: `sums`, and the instructions
  of mma.sync, `warp_instructions`.
- Operands: `loading`, `few_rows`, `feed`, `tma_feed`, `warp_copies`, `cp_async`, `staged`, `block_scales`,
  `weight_groups`, `stored_values`, `batch`, `tails`.
- The warps of a CTA: `crew`, `rings`.
- Schedules: `scheduler`, `work_items`, `split_k`, `split_sums`, `overlap`.
- Reductions: `finish`, `last_tile`, `results`, `workspace`.
- Names of kernels: `entry`. Values that the compiler can't see through: `opaque`; `instructions` that it
  does not move, and arithmetic with values that are `packed`.
"""
