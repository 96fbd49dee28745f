"""What uneven data and numbers of workers that are no power of two do to accuracy, many workers in one process."""
