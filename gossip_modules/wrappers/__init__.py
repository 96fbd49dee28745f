"""The `nn.Module` wrappers of gossip in lockstep and of all-reduce, and what all wrappers share."""
