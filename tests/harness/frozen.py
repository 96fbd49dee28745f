"""Imported last by the server of forks: see `tests.harness.processes`."""

import gc

gc.collect()
gc.freeze()
