"""A run whose workers may die, come back and be added: `worker.run_elastic` is one process of it."""
