"""What workers say to each other in the store, and what follows from it: who is in which generation."""
