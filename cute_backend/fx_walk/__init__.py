"""From a post-grad FX graph to EpilogueSpecs: find matrix products, grow regions, classify loads, rewrite.

    regions, rejections = find_regions(graph, precision, capability)
    rewrite(graph, regions)

`collect(fn, args)` reports the same for a function, without a GPU; `EpiloguePass` does it inside Inductor.

- The pass: `epilogue_pass`, `pass_sequence`, `containment`, `working_copy`, `rewrite`, `direct_call`,
  `collect`.
- Products: `anchors`, `anchor`, `dense_products`, `scaled_products`, `grouped_products`, `product_operands`,
  `activation`, `scaling_recipes`, `broadcast`, `group_rows`, `opaque_products`, `padding`,
  `row_slices`, `packed`, `packed_heads`, `packed_copies`, `index_lists`, `repeats`.
- Rewrites before the search: `gated_units`, `log_softmax`.
- Growing a region: `regions`, `walk`, `visits`, `growth`, `joining`, `resolve`, `dependences`, `draft`,
  `chain`, `lower`, `composites`, `numbers`, `bits`, `quotient`, `reductions`, `finishing`,
  `block_reductions`, `block_parts`, `rotations`, `tiled_scales`, `concatenation`, `pairs`, `shared_launch`,
  `region`.
- Operands and shapes: `classify`, `frame`, `free_strides`, `views`, `static`, `labels`, `capability`,
  `rounded`.
- Results in caches: `cache_writes`.
- Several GPUs: `async_tp`, `exposed_gathers`, `product_times`.
- Where a region ends: `settle`, `boundary`, `crossings`, `outside`, `consumers`, `launches`, `redo`.
- Facts about graphs: `equal`, `flow`, `mutation`, `new_calls`, `questions`, `spelled`.
- Refusals: `reasons`, `graph_breaks`.
- Tuning: `tuning_jobs`, `unfused`.
"""
