"""The protocol of dpwa: length-prefixed frames over TCP, in the clear or under TLS, a server and a client."""
