"""How the ranks of a run take their steps by each method of gossip_modules.methods."""
