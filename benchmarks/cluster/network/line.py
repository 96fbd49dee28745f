"""The line between regions: Ethernet frames that arrive later, in a process of its own.

    python -m benchmarks.cluster.network.line SECONDS HOSTS DEVICE DEVICE ...

Each region's bridge has a TAP device; frames that the bridge sends to hosts of another region leave it there, are kept
for SECONDS, and enter the bridge of their region. The kernel shapes the rate, at the devices; this process only delays.
Linux's netem would do the same, where the kernel has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x01, 0x02  # offloads: a frame of 64 KiB passes whole, as between namespaces
_HEADER = 10  # bytes of struct virtio_net_hdr before each frame
_MAX_FRAME, _BATCH = 1 << 17, 64


def region_of(rank: int, num_hosts: int, num_regions: int) -> int:
    """The region of a host; regions are runs of hosts, of almost equal size."""
    return rank * num_regions // num_hosts


def main(arguments: Sequence[str]) -> None:
    """Carry frames until the process is killed."""
    seconds, num_hosts, devices = float(arguments[0]), int(arguments[1]), arguments[2:]
    files = [_open(device) for device in devices]
    selector = selectors.DefaultSelector()
    for file in files:
        selector.register(file, selectors.EVENT_READ)
    flying: deque[tuple[float, int, bytes]] = deque()  # due time, device, frame; in the order of their times
    print("ready", flush=True)
    while True:
        wait = max(flying[0][0] - time.monotonic(), 0.0) if flying else None
        for key, _ in selector.select(wait):
            due = time.monotonic() + seconds
            for _ in range(_BATCH):
                try:
                    frame = os.read(key.fd, _MAX_FRAME)
                except BlockingIOError:
                    break
                place = frame[_HEADER + 5]  # the last byte of the receiver's hardware address: its rank + 1
                if frame[_HEADER] == 2 and 0 < place <= num_hosts:  # else a multicast of the kernel's own
                    flying.append((due, files[region_of(place - 1, num_hosts, len(files))], frame))
        now = time.monotonic()
        while flying and flying[0][0] <= now:
            _, file, frame = flying.popleft()
            with contextlib.suppress(BlockingIOError):  # the bridge is full: the frame is lost, as on a line
                os.write(file, frame)


def _open(device: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUMS | _SEGMENTS)
    return file


if __name__ == "__main__":
    main(sys.argv[1:])
