"""From a post-grad FX graph to EpilogueSpecs: find matrix products, grow regions, classify loads, rewrite."""
