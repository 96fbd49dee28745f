"""Training methods by name, as the command line knows them."""
