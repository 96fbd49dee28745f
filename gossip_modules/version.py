"""The version of the library: setup.py reads it, and workers of one job must have the same."""

__version__ = "0.2.0"
