"""From a post-grad FX graph to EpilogueSpecs: find matrix products, grow regions, classify loads, rewrite.

    regions, rejections = find_regions(graph, precision, capability)
    rewrite(graph, regions)

`EpiloguePass` does it inside Inductor, and `collect(fn, args)` reports the same for a function, without a
GPU. Modules import from their own folder and from those below it:

- `replacement`
- `search`
- `preparation`
- `ends`
- `members`
- `region`
- `products`
- `values`
- `refusals`
- `graph`
"""
