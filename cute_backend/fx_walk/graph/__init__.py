"""Facts about FX graphs and the plane of a product, and calls that are added to graphs; no chain."""
