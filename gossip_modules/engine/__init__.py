"""When rounds run: at the safe point of a training step, or in a thread beside training."""
