"""A job of several processes: its world, its addresses, its files, and how it stops."""
