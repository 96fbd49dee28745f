"""Weights beside the parameters: swapped ones, copies in optimizers, masters."""
