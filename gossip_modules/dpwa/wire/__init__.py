"""The protocol of dpwa over ZeroMQ: requests, models and keys, a server and a client."""
