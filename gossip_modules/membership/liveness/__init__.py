"""Liveness: a closed connection shows the end of a process, and heartbeats show that it runs."""
