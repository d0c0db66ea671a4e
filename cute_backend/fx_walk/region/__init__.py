"""A growing region and a finished one; what a member is, and its value; which regions read which."""
