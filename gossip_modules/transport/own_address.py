"""The address of this machine, at which others reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence


def checked_host(host: str, *, others: str) -> str:
    """The numbers of the IPv4 address of `host`, looked up once.

    Args:
        host: a name or an address of this machine.
        others: a name for those that reach it, for errors.

    Raises:
        ValueError: `host` is no text, not this machine, all of its interfaces, or a group of machines.
    """
    if not isinstance(host, str):
        raise ValueError(f"got host={host!r}, expected text, such as '10.0.0.1'; pass the IPv4 address of this machine")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"got host={host!r}, which is no IPv4 address of this machine ({error}), expected the IPv4 address "
                f"at which {others} reach it"
            ) from error
        found = str(probe.getsockname()[0])
    if found == "0.0.0.0":
        raise ValueError(
            f"got host={host!r}, which is all interfaces of this machine, expected the address of one at which "
            f"{others} reach it"
        )
    if ipaddress.ip_address(found).is_multicast or found == "255.255.255.255":
        raise ValueError(
            f"got host={host!r}, which is a group of machines, expected the address of this one at which {others} "
            "reach it"
        )
    return found


def check_reachable(addresses: Sequence[str], machines: Sequence[str], names: Sequence[int]) -> None:
    """Raise ValueError if a loopback address stands for a rank that ranks on other machines must reach.

    Args:
        addresses: the IPv4 address of each rank.
        machines: the name of the machine of each rank.
        names: the numbers of the ranks, for the error.
    """
    loopback = [i for i, address in enumerate(addresses) if address.startswith("127.")]
    if loopback and (len(loopback) < len(addresses) or len(set(machines)) > 1):
        other = next(j for j in range(len(addresses)) if j not in loopback or machines[j] != machines[loopback[0]])
        raise ValueError(
            f"got {addresses[loopback[0]]} for the address of ranks {[names[i] for i in loopback]}, which only their "
            f"own machine reaches, in a job with rank {names[other]} at {addresses[other]} on {machines[other]!r}, "
            "expected an address at which all ranks reach them; pass host=, or set GLOO_SOCKET_IFNAME"
        )
