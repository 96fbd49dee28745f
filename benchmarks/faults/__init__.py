"""What every wrapper does when a rank is killed, stopped, fails or leaves: a table, made by `make faults`.

See `python -m benchmarks.faults --help`.
"""
