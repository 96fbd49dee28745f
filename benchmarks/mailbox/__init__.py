"""The mailbox on the wire: workers in network namespaces that reach one S3 server, its requests, and a soak."""
