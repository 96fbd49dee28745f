"""dpwa: each worker pulls the model of a random peer that is alive."""
