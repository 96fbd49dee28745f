"""Data and methods of the consensus experiment, train/consensus.py."""
