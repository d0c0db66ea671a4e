"""Facts about FX graphs and the plane of a product, and helpers that add calls; no chain, no product."""
