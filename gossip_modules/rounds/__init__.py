"""Rounds of algorithms: what an algorithm may ask for, what it remembers, and the drivers that answer."""
