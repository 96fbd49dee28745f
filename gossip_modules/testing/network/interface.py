"""A network namespace for this process, whose only way out is a TUN device: packets as reads and writes of a file."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

NAME = "gossip0"
"""Of the device."""
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_IFF_UP = 0x1


def enter_namespace(address: str, netmask: str) -> int:
    """Move this thread, and those that it starts, to a network namespace of its own.

    The namespace has a loopback and a TUN device with the given address.

    Args:
        address, netmask: IPv4, like "10.77.0.2" and "255.255.0.0".

    Returns:
        The descriptor of the device: a read is a packet that the namespace sends, a write is one that it gets. The
        namespace lasts until it is closed, also when the process has ended: then its kernel still answers, as that of
        a machine whose process has died.

    Raises:
        PermissionError: this process may not, which takes root or CAP_SYS_ADMIN and CAP_NET_ADMIN.
        OSError: there is no /dev/net/tun.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise PermissionError(number, f"no network namespace ({os.strerror(number)}), expected to run as root")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", NAME.encode(), _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFADDR, _address_request(address))
            fcntl.ioctl(any_socket, _SIOCSIFNETMASK, _address_request(netmask))
            for name in ("lo", NAME):
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), _IFF_UP))
    except BaseException:
        os.close(device)
        raise
    return device


def _address_request(address: str) -> bytes:
    """A struct ifreq of the device with an address."""
    return struct.pack("16sHH4s16x", NAME.encode(), socket.AF_INET, 0, socket.inet_aton(address))
