"""Limits of time: one for several waits, and waits that end when they are told to."""
