"""An emulated cluster on one Linux machine: hosts as network namespaces, links shaped, compute waited.

See `python -m benchmarks.cluster --help`.
"""
