"""Membership: workers that die, come back and are added, while training goes on."""
