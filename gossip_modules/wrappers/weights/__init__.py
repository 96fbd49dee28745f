"""Other weights than those of training: copies that optimizers keep, and averages that evaluation swaps in."""
