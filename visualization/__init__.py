"""Plots of finished runs; everything here reads files only."""
