"""A soak: workers train while a random fault hits them every two seconds, and what must hold is checked."""
