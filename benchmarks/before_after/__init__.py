"""The time of a training step with this tree's library beside that with an earlier commit's, in one run."""
