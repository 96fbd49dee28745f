"""The user's training loop as the library observes it: where steps begin and end, and which code writes parameters."""
