"""Where a region ends: the stores with which the fewest bytes are read and written."""
