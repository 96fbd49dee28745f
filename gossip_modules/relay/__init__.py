"""Gossip that relays sums of models through trees."""
