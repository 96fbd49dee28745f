"""Network: workers in network namespaces of their own, behind a router that delays, loses and cuts off packets."""
