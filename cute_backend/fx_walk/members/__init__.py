"""Work that joins a region as a whole: several nodes that mean one thing."""
