"""Optimizers for ranks that gossip."""
