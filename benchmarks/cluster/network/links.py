"""The cluster's network: a namespace per host, a switch between them, each link shaped both ways."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from benchmarks.cluster.network import namespaces
from benchmarks.cluster.network.line import region_of
from benchmarks.cluster.network.reaper import ROOT, Reaper

if TYPE_CHECKING:
    from typing_extensions import Self

DATA, CONTROL = "eth0", "ctl0"
"""Interfaces of a host: the shaped one, and one for rendezvous and counters, which is not shaped."""
NETWORKS = {DATA: 77, CONTROL: 78}
"""A byte of the addresses on each."""
MIN_HOSTS, MAX_HOSTS = 2, 250
"""There are that many addresses."""
MIN_RATE = 1e6
"""In bit/s; slower links would take minutes for a step."""
BURST, LATENCY = "128kb", "20ms"
"""Of the token bucket: bytes that may pass at once, and how long a packet may queue before it is dropped."""
CONGESTION_CONTROLS = ("cubic", "bbr")
"""Of TCP; the first is Linux's default. The machine's own setting would decide how full the links are."""
LINE_SHARE = 0.957
"""What TCP/IP leaves of a link for payload, at 1500 bytes a packet."""
_serials = itertools.count()


@dataclass(frozen=True)
class RegionLine:
    """The line of a region, which its hosts share, to all other regions.

    Args:
        rate: in bit/s, each way.
        round_trip_seconds: which it adds to a round trip between regions.

    Raises:
        ValueError: out of range.
    """

    rate: float
    round_trip_seconds: float

    def __post_init__(self) -> None:
        if not MIN_RATE <= self.rate < math.inf or not 0 <= self.round_trip_seconds < 10:
            raise ValueError(f"got {self}, expected at least {MIN_RATE:g} bit/s and a round trip of 0 to 10 s")


@dataclass(frozen=True)
class LinkRates:
    """How fast the hosts' links are.

    Args:
        rate: in bit/s, both ways; 0: not shaped.
        slow_share: the last host's link has this share of the rate; 0: all links are equal.
        congestion_control: the algorithm of TCP, one of CONGESTION_CONTROLS.
        num_regions: the hosts are in so many regions, in their order.
        line: of each region, where there are several.

    Raises:
        ValueError: out of range.
    """

    rate: float
    slow_share: float = 0.0
    congestion_control: str = CONGESTION_CONTROLS[0]
    num_regions: int = 1
    line: RegionLine | None = None

    def __post_init__(self) -> None:
        control = self.congestion_control
        if self.num_regions < 1 or (self.num_regions > 1) is not (self.line is not None):
            raise ValueError(f"got num_regions={self.num_regions} and line={self.line}, expected a line for several")
        if control not in CONGESTION_CONTROLS:
            raise ValueError(f"got congestion_control={control!r}, expected one of {CONGESTION_CONTROLS}")
        slowest = self.rate * (self.slow_share or 1.0)
        if not (self.rate == 0 or MIN_RATE <= slowest < math.inf) or not 0 <= self.slow_share <= 1:
            raise ValueError(
                f"got a rate of {self.rate:g} bit/s and slow_share={self.slow_share}, the slowest link {slowest:g} "
                f"bit/s, expected 0 or at least {MIN_RATE:g} for each link, and a share of at most 1; options are in "
                "Gbit/s"
            )

    def rates(self, num_hosts: int) -> list[float]:
        """Of each host's link, in bit/s."""
        last = self.rate * (self.slow_share or 1.0)
        return [*[self.rate] * (num_hosts - 1), last]


class EmulatedNetwork:
    """N hosts joined by a switch that is never the bottleneck. Use it as a context manager, or `close()` it.

    All of it is in namespaces, the switch too: nothing of the machine's own network is touched. Leftovers of processes
    that have died are removed first.

    Args:
        num_hosts: 2 to 250.
        links: between the hosts and the switch.

    Raises:
        ClusterUnavailableError: no root, no iproute2, or a kernel without what is needed.
        ValueError: another number of hosts.
    """

    def __init__(self, num_hosts: int, links: LinkRates) -> None:
        if not MIN_HOSTS <= num_hosts <= MAX_HOSTS:
            raise ValueError(
                f"got {num_hosts} hosts, expected {MIN_HOSTS} to {MAX_HOSTS}: there are that many addresses; see "
                "--hosts"
            )
        namespaces.require()
        namespaces.remove(namespaces.abandoned(namespaces.names()))
        prefix = self._prefix = namespaces.owner_prefix(next(_serials))
        self.hosts: tuple[str, ...] = tuple(f"{prefix}{rank}" for rank in range(num_hosts))
        self.switch = f"{prefix}switch"
        self._reaper = Reaper(prefix)
        self._line: subprocess.Popen[str] | None = None
        try:
            self._build(self.switch, links)
        except BaseException:
            self.close()
            raise

    def _build(self, switch: str, links: LinkRates) -> None:
        for namespace in (switch, *self.hosts):
            namespaces.run("ip", "netns", "add", namespace)
        rates, num_regions = links.rates(len(self.hosts)), links.num_regions
        ranks, regions = range(len(self.hosts)), range(num_regions)
        bridges = {DATA: [f"{DATA}-bridge-{region}" for region in regions], CONTROL: [f"{CONTROL}-bridge"]}
        lines, ports = [], []
        for bridge in [*bridges[DATA], *bridges[CONTROL]]:
            lines += [f"link add {bridge} type bridge mcast_snooping 0", *_up(bridge)]
        for rank, host in enumerate(self.hosts):
            for interface, network in NETWORKS.items():
                port, own = f"{interface}-{rank}", bridges[interface]
                bridge = own[region_of(rank, len(self.hosts), len(own))]
                cable = f"type veth peer name {interface} address {_hardware_address(network, rank)} netns {host}"
                lines += [f"link add {port} {cable}", *_up(port, bridge)]
                # A bridge sends a first frame to all ports, the line too, where it does not know the receiver's.
                ports.append(f"fdb add {_hardware_address(network, rank)} dev {port} master static")
        if links.line is not None:
            for region, bridge in zip(regions, bridges[DATA], strict=True):
                lines += [f"tuntap add dev {_line(region)} mode tap", *_up(_line(region), bridge)]
                ports += [
                    f"fdb add {_hardware_address(NETWORKS[DATA], rank)} dev {_line(region)} master static"
                    for rank in ranks
                    if region_of(rank, len(self.hosts), num_regions) != region
                ]
        namespaces.run_batch(switch, lines)
        namespaces.run_batch(switch, ports, tool="bridge")
        if links.line is not None:
            for region in regions:
                _shape(switch, _line(region), links.line.rate)
            self._carry(switch, links.line.round_trip_seconds / 2, num_regions)
        for rank, (host, rate) in enumerate(zip(self.hosts, rates, strict=True)):
            lines = ["link set lo up"]
            for interface, network in NETWORKS.items():
                lines += [f"address add {_address(network, rank)}/24 dev {interface}", *_up(interface)]
                # No ARP: on a busy machine its answers come too late for n^2 first connections.
                lines += [
                    f"neighbour add {_address(network, other)} lladdr {_hardware_address(network, other)} "
                    f"dev {interface} nud permanent"
                    for other in ranks
                    if other != rank
                ]
                # By the route: a namespace may not choose what is not allowed to everyone on the machine.
                lines.append(
                    f"route replace 10.{network}.0.0/24 dev {interface} src {_address(network, rank)} "
                    f"congctl {links.congestion_control}"
                )
            namespaces.run_batch(host, lines)
            if rate:
                _shape(host, DATA, rate)  # what the host sends
                _shape(switch, f"{DATA}-{rank}", rate)  # what it receives

    def _carry(self, switch: str, seconds: float, num_regions: int) -> None:
        """Start the line; it ends with its namespace."""
        devices = [_line(region) for region in range(num_regions)]
        command = ["ip", "netns", "exec", switch, sys.executable, "-m", "benchmarks.cluster.network.line"]
        line = subprocess.Popen(
            [*command, str(seconds), str(len(self.hosts)), *devices],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        self._line = line
        assert line.stdout is not None
        with line.stdout as output:
            is_ready = output.readline() == "ready\n"
        if not is_ready:
            raise namespaces.ClusterUnavailableError(
                "got no line between regions, expected TAP devices: the kernel must have /dev/net/tun; see its error"
            )

    def address(self, rank: int) -> str:
        """Of a host, on the shaped network."""
        return _address(NETWORKS[DATA], rank)

    def control_address(self, rank: int) -> str:
        """Of a host, on the network that is not shaped."""
        return _address(NETWORKS[CONTROL], rank)

    def has_neighbours(self) -> bool:
        """Whether there is another cluster on this machine, of another process or of this one."""
        return any(not name.startswith(self._prefix) for name in namespaces.names())

    def close(self) -> None:
        """Remove everything, with the processes in it. Idempotent."""
        self._reaper.close()
        if self._line is not None:
            self._line.wait()
            self._line = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _up(interface: str, bridge: str = "") -> list[str]:
    """Return the commands that start an interface, without the IPv6 multicasts that count as the hosts' bytes."""
    lines = [f"link set {interface} addrgenmode none"] if os.path.exists("/proc/net/if_inet6") else []
    if bridge:
        lines.append(f"link set {interface} master {bridge}")
    return [*lines, f"link set {interface} up"]


def _address(network: int, rank: int) -> str:
    return f"10.{network}.0.{rank + 1}"


def _hardware_address(network: int, rank: int) -> str:
    return f"02:00:00:00:{network:02x}:{rank + 1:02x}"


def line_bytes(switch: str, region: int) -> int:
    """Bytes that a region has sent to other regions so far, headers included; also for processes in a host.

    Args:
        switch: the namespace of an `EmulatedNetwork` with that name.
        region: the number of the region.
    """
    path = f"/sys/class/net/{_line(region)}/statistics/tx_bytes"
    return int(namespaces.run("ip", "netns", "exec", switch, "cat", path))


def _line(region: int) -> str:
    return f"line-{region}"


def _shape(namespace: str, interface: str, rate: float) -> None:
    bucket = ("tbf", "rate", f"{rate:.0f}bit", "burst", BURST, "latency", LATENCY)
    namespaces.run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)
