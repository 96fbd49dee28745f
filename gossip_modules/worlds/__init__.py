"""The world of a model: the other processes of its training, and the laws of exchanges with them."""
