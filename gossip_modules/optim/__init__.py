"""Optimizers for gossip."""
