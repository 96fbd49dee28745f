"""Outer optimizers: ranks train alone for some steps, then an optimizer steps on where they have come."""
