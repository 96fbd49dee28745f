"""Plots of one quantity against another, a line per run."""
