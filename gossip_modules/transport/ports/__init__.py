"""Ports: which connections they accept, and how many."""
