"""The address at which other workers reach this one."""

from __future__ import annotations

import socket


def own_address(store: str, host: str | None = None) -> str:
    """The numbers of the address that `host` names, looked up once; without one, that of the interface to the store.

    Args:
        store: "host:port", or what is none, for which this machine is the whole network.
        host: a name or an address of this machine.

    Raises:
        ValueError: `host` is not this machine.
    """
    name, _, port = store.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if host is not None:
            try:
                probe.bind((host, 0))
            except OSError as error:
                raise ValueError(
                    f"got host={host!r}, which is no address of this machine ({error}), expected the one at which the "
                    "other workers reach it"
                ) from error
        elif not port.isdigit():
            return "127.0.0.1"
        else:
            try:
                probe.connect((name, int(port)))
            except OSError:
                return "127.0.0.1"
        return str(probe.getsockname()[0])
