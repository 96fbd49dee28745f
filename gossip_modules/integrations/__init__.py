"""Gossip in the training stacks of others; each file needs one package, which the extra of its name installs."""
