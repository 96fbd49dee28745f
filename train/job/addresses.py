"""Addresses: under which host the other processes of a job reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys

from train.job.world import Agreement

SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def own_host(world: Agreement) -> str:
    """Collective: an IPv4 address of this machine that all other ranks reach.

    That of GLOO_SOCKET_IFNAME, the interface that Gloo was told to use; else that from which MASTER_ADDR is reached.
    On the host of the master itself that may be a loopback address, which serves as long as there are no other hosts;
    otherwise it is that from which another host is reached.

    Raises:
        ValueError: there is no such interface or no such host; names the ranks.
    """
    hosts: list[str] = world.on_every_rank(_first_guess)
    mine = hosts[world.rank]
    elsewhere = [host for host in hosts if not ipaddress.ip_address(host).is_loopback]
    if elsewhere and ipaddress.ip_address(mine).is_loopback:
        return source_address(elsewhere[0])
    return mine


def _first_guess() -> str:
    # Gloo takes a list, and uses the first.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return interface_address(interface) if interface else source_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))


def source_address(host: str) -> str:
    """The IPv4 address from which this machine reaches `host`; sends nothing.

    Raises:
        ValueError: there is no way to `host`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # any port: a datagram socket only looks up the route
        except OSError as error:
            raise ValueError(
                f"got no way to {host} ({error}), expected a host of this job; check MASTER_ADDR, or name the network "
                "interface in GLOO_SOCKET_IFNAME"
            ) from error
        return str(probe.getsockname()[0])


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface of this machine.

    Raises:
        ValueError: there is none, or this is not Linux.
    """
    if sys.platform != "linux":
        raise ValueError(
            f"got GLOO_SOCKET_IFNAME={name} on {sys.platform}, expected Linux, which tells the address of an "
            "interface; unset it, and the address is the one from which this machine reaches MASTER_ADDR"
        )
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"got GLOO_SOCKET_IFNAME={name} ({error}), expected an interface with an IPv4 address; choose one of "
                f"{names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
