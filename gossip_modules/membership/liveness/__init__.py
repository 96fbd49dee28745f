"""Liveness: connections that say whether a process has ended, beside heartbeats, which say whether it runs."""
