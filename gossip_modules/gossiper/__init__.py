"""The gossip algorithms in lockstep: D-PSGD, SGP, CHOCO-SGD, DeepSqueeze, Moniqua and PowerGossip."""
