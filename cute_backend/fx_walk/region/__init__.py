"""A growing region and a finished one; what a member is, and its value; how regions follow each other."""
