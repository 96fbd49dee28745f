"""SPARTA: ranks average a few parameters in each step, drawn at random."""
