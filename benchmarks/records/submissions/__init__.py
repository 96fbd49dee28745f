"""A file for each submission, with one class that derives from `Submission`."""
