"""What a donor does for a worker that joins."""
