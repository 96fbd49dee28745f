"""What is trained: data, model, optimizer and scores."""
