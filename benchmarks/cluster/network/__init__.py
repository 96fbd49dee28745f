"""The hosts and links of the emulated cluster: network namespaces, their shaped links, and who removes them."""
