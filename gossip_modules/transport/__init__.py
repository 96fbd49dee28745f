"""Messages between the ranks of a process group: sends and receives with timeouts; errors name the peer."""
