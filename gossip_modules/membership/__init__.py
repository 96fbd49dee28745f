"""Membership: workers die, come back and are added, while training goes on."""
