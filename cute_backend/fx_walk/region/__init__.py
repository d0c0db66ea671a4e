"""A growing region and a finished one, their values, and how regions follow each other."""
