"""One run: the training loop, its state, checkpoints, logs and report."""
