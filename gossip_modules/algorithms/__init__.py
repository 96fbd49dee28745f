"""The algorithms that run in rounds, one file for each paper."""
