"""A file for each submission, with a class `Entry`."""
