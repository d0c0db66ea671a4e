"""Calls of the op in place of regions, and the choice to leave a region to Inductor, also by tuning."""
