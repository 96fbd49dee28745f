"""What workers of dpwa send each other: requests, models and keys over sockets."""
