"""Calls that take the place of regions in the graph, and the choice to leave a region to Inductor."""
