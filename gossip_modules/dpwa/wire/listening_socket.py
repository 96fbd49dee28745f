"""A listening TCP socket at an address of ZeroMQ's form."""

from __future__ import annotations

import fcntl
import socket
import struct

from ...transport.ports.bounded_listener import BACKLOG

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def open_listener(address: str, *, name: str) -> socket.socket:
    """Listen at "tcp://host:port"; the host may be * or a network interface, the port * or 0. Does not block.

    Args:
        address: where to listen.
        name: the name of this worker, for errors.

    Raises:
        ValueError: `address` is not of this form, or no such host is known.
        ConnectionError: the address cannot be bound.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        if host in [interface for _, interface in socket.if_nameindex()]:
            host = _host_of(host)
        found = socket.getaddrinfo(
            None if host == "*" else host.strip("[]"),
            0 if port == "*" else int(port),
            type=socket.SOCK_STREAM,
            family=socket.AF_INET if host == "*" else socket.AF_UNSPEC,
            flags=socket.AI_PASSIVE,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"worker {name!r}: got address {address!r}, expected 'tcp://host:port': {error}") from error
    family, *_, place = found[0]
    try:
        listener = socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConnectionError(
            f"worker {name!r}: cannot bind {address}: {error}; is another process using this port?"
        ) from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """Where a listener is reached, as "tcp://host:port"."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _host_of(interface: str) -> str:
    """The address of a network interface, which ZeroMQ's addresses may name."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
