"""Speed and accuracy where some ranks are slow, pause or die.

See `python -m benchmarks.stragglers --help`.
"""
