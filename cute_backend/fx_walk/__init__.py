"""From a post-grad FX graph to EpilogueSpecs: find matrix products, grow regions, classify loads, rewrite.

    regions, rejections = find_regions(graph, precision, capability)
    rewrite(graph, regions)

`collect(fn, args)` reports the same for a function, without a GPU; `EpiloguePass` does it inside Inductor.
"""
