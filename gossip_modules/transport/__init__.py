"""Messages between the ranks of a process group: sends and receives with timeouts that name the peer."""
