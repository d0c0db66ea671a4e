"""Ends of regions: what could cross a region's boundary, and the stores with the fewest bytes."""
