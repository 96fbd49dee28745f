"""Measurements of the library beside others; see README.md there. Each script runs by path, or by `python -m`."""
