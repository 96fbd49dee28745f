"""Liveness: connections that show whether a process has ended, and heartbeats that show whether it runs."""
