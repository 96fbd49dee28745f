"""Gossip in other training stacks; each file needs one package. The extra of its name installs the package."""
