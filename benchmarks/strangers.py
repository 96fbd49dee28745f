r"""Strangers at all ports of a job: recorded and altered messages while workers train, with and without a key.

    python -m benchmarks.strangers  # 50,000 messages at each port; as root, as it reads packets; resumes after an end
    python -m benchmarks.strangers --messages 2000 --repeats 1 --output quick.csv

Three workers of a membership train on a ring, and two workers of dpwa keep one model. A stranger connects to one port
of a new job and sends messages of a worker that it has recorded, as they were or with bytes changed, cut or added. With
a key it also writes values of the store back, old or altered; without one this would be the end of the job, as the
guide to security says. At the ports of Gloo it tries to connect, and sends 32 bytes where it can.

`accepted` counts the messages that were answered as a worker's; at the ports of Gloo, the connections that took bytes.
`changed` counts the recorded steps after which a model has other bits than in a run without strangers, of `compared`
ones (dpwa: entries that have changed, of `compared` ones). Descriptors and memory are of all processes of the job
together, before and 11 s after the attack; those of the store itself are in columns of their own. `ratio` is the median
time of a step under attack beside that of the same job before. A stranger at full speed takes part of a core from
training, with the key and without.

Where the port is "wire", a program reads all packets of a job of dpwa for 5 s: `messages` counts them, and `learnt`
those that have numbers of the model, or the key. Where the port is "none", `ratio` is the median time of a step of a
job with the key, or with TLS, beside that of one without, which train side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import signal
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.record import ROOT, append_row, rows_in
from gossip_modules import GossipDataParallel, Membership, PairwiseDataParallel, RingGraph
from gossip_modules.dpwa.protocol import HEADER_BYTES, MessageHeader, MessageKind, ModelShape
from gossip_modules.membership.liveness.contact import HELLO, Contact, Greeting, digest
from gossip_modules.transport.job_key import VARIABLE, Handshake

KEY = "a key of the benchmark"
EVERY = 50  # steps between two records of a model
VALUE = 1234.5
SECONDS = 60.0
REPORT_SECONDS = 180.0  # with the start of the processes, on a busy machine
HOST = "127.0.0.1"
SNIFF_SECONDS = 5.0


def resources() -> tuple[int, int]:
    """The descriptors and the memory, in bytes, of this process."""
    return resources_of(os.getpid())


def resources_of(process: int) -> tuple[int, int]:
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    return len(os.listdir(f"/proc/{process}/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def member(pipe: Connection, store: str) -> None:
    """Train until the pipe says that it is enough."""
    torch.set_num_threads(1)
    membership = Membership(store, min_workers=3, timeout=SECONDS, min_deadline=30.0)
    torch.manual_seed(0)
    net = nn.Linear(100, 100)
    model = GossipDataParallel(net, graph=RingGraph, membership=membership)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    records, times = dict[int, int](), list[float]()
    for step in membership.steps(1 << 40):
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(1000 * step + membership.rank)
        model(torch.randn(8, 100, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        if step % EVERY == 0:
            records[step] = zlib.crc32(net.weight.detach().numpy().tobytes())
        if pipe.poll(0):
            liveness = membership.worker.liveness
            assert liveness is not None
            pipe.recv()
            contact = (liveness.contact.worker, liveness.contact.address, liveness.contact.secret)
            told = {"records": records, "times": times, "resources": resources(), "contact": contact, "step": step}
            pipe.send(told | {"members": membership.members, "rank": membership.rank})
            records, times = {}, []


def contexts(folder: str) -> dict[str, Any]:
    """The arguments for TLS of a worker of dpwa, as the guide to security has them; none for an empty folder."""
    if not folder:
        return {}
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=f"{folder}/ca.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=f"{folder}/ca.pem")
    for context in (server, client):
        context.load_cert_chain(f"{folder}/worker.pem", f"{folder}/worker.key")
    return {"server_ssl": server, "client_ssl": client}


def certify(folder: str) -> None:
    """Make an authority, and a certificate for this host, in a folder."""
    (Path(folder) / "worker.ext").write_text(f"subjectAltName=IP:{HOST}\n", encoding="utf-8")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    for command in (
        f"req -x509 {new} -subj /CN=ca -keyout ca.key -out ca.pem",
        f"req {new} -subj /CN=worker -keyout worker.key -out worker.csr",
        "x509 -req -in worker.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile worker.ext -out worker.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True, timeout=30)


def pair(pipe: Connection, name: str, peers: dict[str, str], folder: str) -> None:
    """Keep a model that is equal on both workers."""
    torch.set_num_threads(1)
    net = nn.Linear(100, 100)
    for parameter in net.parameters():
        nn.init.constant_(parameter, VALUE)
    model = PairwiseDataParallel(net, name=name, peers=peers, timeout=timedelta(seconds=5), **contexts(folder))
    optimizer, times = torch.optim.SGD(model.parameters(), lr=0.0), list[float]()
    while True:
        start = time.perf_counter()
        model(torch.ones(1, 100)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        if pipe.poll(0):
            pipe.recv()
            changed = sum(int((parameter != VALUE).sum()) for parameter in net.parameters())
            compared = sum(parameter.numel() for parameter in net.parameters())
            pipe.send({"times": times, "resources": resources(), "changed": changed, "compared": compared})
            times = []


class AttackedJob:
    """The processes of a job.

    Args:
        kind: "membership" or "dpwa".
        key: whether it has a key.
        tls: whether its workers have certificates.
    """

    def __init__(self, kind: str, *, key: bool, tls: bool = False) -> None:
        self.kind, self.key, self.tls = kind, KEY.encode() if key else None, tls
        os.environ.pop(VARIABLE, None)
        if key:
            os.environ[VARIABLE] = KEY  # which the processes inherit
        self.server: subprocess.Popen[str] | None = None
        self.pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folder = tempfile.TemporaryDirectory()
        if tls:
            certify(self._folder.name)
        spawn = multiprocessing.get_context("spawn")
        if kind == "membership":
            command = [sys.executable, "-m", "gossip_modules.membership.serve", "--host", HOST, "--port", "0"]
            self.server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            assert self.server.stdout is not None
            found = re.search(r"port (\d+)", self.server.stdout.readline())
            assert found is not None
            self.port = int(found[1])
            works: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(member, (f"{HOST}:{self.port}",))] * 3
        else:
            self.peers = {name: f"tcp://{HOST}:{free_port()}" for name in "ab"}
            works = [(pair, (name, self.peers, self._folder.name if tls else "")) for name in "ab"]
        for function, arguments in works:
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=function, args=(theirs, *arguments), daemon=True)
            process.start()
            self.pipes.append(mine)
            self._processes.append(process)

    def report(self) -> list[dict[str, Any]]:
        """The reports of all workers, in the order of their ranks."""
        for pipe in self.pipes:
            pipe.send("report")
        found, waiting = [], list(self.pipes)
        while waiting:  # for any of them: a worker that cannot write its report takes no step with the others
            ready = wait(waiting, REPORT_SECONDS)
            if not ready:
                raise TimeoutError(f"a worker of {self.kind} does not train: got no report in {REPORT_SECONDS} s")
            for pipe in [each for each in waiting if each in ready]:
                found.append(pipe.recv())
                waiting.remove(pipe)
        return sorted(found, key=lambda each: each.get("rank", 0))

    def resources(self, reports: list[dict[str, Any]]) -> tuple[int, int]:
        """The descriptors and the memory of all processes."""
        all_of = [each["resources"] for each in reports]
        if self.server is not None:
            all_of.append(self.store_resources())
        return sum(each[0] for each in all_of), sum(each[1] for each in all_of)

    def store_resources(self) -> tuple[int, int]:
        """The descriptors and the memory of the store; 0 if the job has none."""
        return (0, 0) if self.server is None else resources_of(self.server.pid)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait()
        self._folder.cleanup()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


# The stranger.


def altered(message: bytes, draw: random.Random) -> bytes:
    """A message with a byte changed, bytes cut off or bytes added; or as it is."""
    kind = draw.randrange(4)
    if kind == 0 and message:
        place = draw.randrange(len(message))
        return message[:place] + bytes([message[place] ^ (1 + draw.randrange(255))]) + message[place + 1 :]
    if kind == 1:
        return message[: draw.randrange(len(message) + 1)]
    return message + draw.randbytes(draw.randrange(64)) if kind == 2 else message


def say(address: tuple[str, int], message: bytes, *, first: int = 0, waits: bool = True) -> bytes:
    """Connect, read so many bytes, send a message, and return the answer."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=2.0) as stranger:
        data = b""
        while len(data) < first and (more := stranger.recv(first - len(data))):
            data += more
        stranger.sendall(message)
        stranger.shutdown(socket.SHUT_WR)
        return stranger.recv(256) if waits else b""
    return b""


def at_liveness(job: AttackedJob, reports: list[dict[str, Any]], count: int, draw: random.Random) -> Iterator[bool]:
    """Repeat the answers of a worker, over other connections; yields whether one is taken for a worker's."""
    contacts = [Contact(*each["contact"]) for each in reports]
    recorded = []
    for contact in contacts:
        with socket.create_connection(contact.address, timeout=2.0) as worker:
            greeting = Greeting(contact, digest("job"), job.key)
            greeting.take(worker.recv(HELLO.size))
            recorded.append(greeting.taken())
            worker.sendall(recorded[-1])
            assert worker.recv(64), "the harness is a worker"
    for i in range(count):
        place = i % len(contacts)
        yield bool(say(contacts[place].address, altered(recorded[place], draw), first=HELLO.size))


def at_store_port(job: AttackedJob, reports: list[dict[str, Any]], count: int, draw: random.Random) -> Iterator[bool]:
    """Bytes of torch's protocol, altered; the store answers strangers, so none counts as accepted."""
    begin = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")  # the query that validates a client
    for _ in range(count):
        say((HOST, job.port), altered(begin, draw) + draw.randbytes(draw.randrange(40)), waits=False)
        yield False


def at_store_values(job: AttackedJob, reports: list[dict[str, Any]], count: int, draw: random.Random) -> Iterator[bool]:
    """Old and altered values under all keys of the job, and higher counts."""
    client = dist.TCPStore(HOST, job.port, is_master=False, wait_for_workers=False)
    found = [key for key in client.list_keys() if key.startswith("gossip/job/")]
    counts = [key for key in found if key.endswith(("/version", "/count", "/nonces"))]  # which have no code
    keys = [key for key in found if key not in counts]
    old = {key: client.get(key) for key in keys}
    for i in range(count):
        key = draw.choice(keys)
        value = altered(old[draw.choice(keys)], draw)
        client.set(key, value.decode(errors="replace"))
        if i % 100 == 0:
            client.add(draw.choice(counts), 1)
            time.sleep(0.02)
        yield False


def at_gloo(job: AttackedJob, reports: list[dict[str, Any]], count: int, draw: random.Random) -> Iterator[bool]:
    """Bytes to the other ports at which the workers listen, which drop connections; yields whether one took them.

    On one machine the kernel answers within the call, or drops the attempt: a longer wait would only end later.
    """
    known = {each["contact"][1][1] for each in reports}
    ports = sorted({port for process in job._processes for port in listening(process.pid)} - known)
    for i in range(count):
        num_bytes = 0
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, ports[i % len(ports)]), timeout=0.002) as stranger,
        ):
            num_bytes = stranger.send(draw.randbytes(32))
        yield num_bytes > 0


def listening(process: int) -> set[int]:
    """The ports at which a process listens."""
    own = set()
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/{process}/fd/{descriptor}"))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return {int(x[1].rpartition(":")[2], 16) for x in lines if x[3] == "0A" and f"socket:[{x[9]}]" in own}


def at_dpwa(job: AttackedJob, reports: list[dict[str, Any]], count: int, draw: random.Random) -> Iterator[bool]:
    """Requests for models, with the recorded answer of a worker before them if the job has a key."""
    frame = HEADER_BYTES.to_bytes(8, "little") + MessageHeader(MessageKind.FETCH, ModelShape(bytes(16), 2, 1)).pack()
    first, recorded, addresses = 0, b"", []
    for address in job.peers.values():
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        addresses.append((host, int(port)))
    if job.key is not None:
        first = 24
        with socket.create_connection(addresses[0], timeout=2.0) as worker:
            recorded, _ = Handshake(job.key, "dpwa").answer(worker.recv(24)[8:])
            worker.sendall(recorded)
            assert len(worker.recv(64)) == 32, "the harness is a worker"
    for i in range(count):
        answer = say(addresses[i % 2], altered(recorded + frame, draw), first=first)
        is_alert = job.tls and answer[:1] == b"\x15"  # which refuses the stranger, as zeros in place of a code do
        yield bool(answer.strip(b"\0")) and not is_alert


PORTS: dict[str, Callable[[AttackedJob, list[dict[str, Any]], int, random.Random], Iterator[bool]]] = {
    "liveness": at_liveness,
    "store": at_store_port,
    "values of the store": at_store_values,
    "gloo": at_gloo,
    "dpwa": at_dpwa,
}


class Target(NamedTuple):
    """A measurement: a row of the file.

    Attributes:
        job: the kind of the job.
        port: one of PORTS; "wire"; or "none", for the cost.
        key: whether the job has a key.
        tls: whether it has certificates.
    """

    job: str
    port: str
    key: bool
    tls: bool = False


SAFE = ((False, False), (True, False), (False, True))
TARGETS = (
    *(Target("membership", "gloo", key) for key in (True, False)),  # the longest, so the reference is enough for all
    *(Target("membership", port, True) for port in ("values of the store", "liveness", "store")),
    *(Target("dpwa", "wire", key, tls) for key, tls in SAFE),
    *(Target("dpwa", "dpwa", key, tls) for key, tls in SAFE),
    *(Target("membership", port, False) for port in ("liveness", "store")),
    Target("membership", "none", True),
    *(Target("dpwa", "none", key, tls) for key, tls in SAFE[1:]),
)
COLUMNS = (
    *Target._fields,
    *("messages", "accepted", "learnt", "changed", "compared", "steps", "same_members"),
    *("descriptors_before", "descriptors_after", "megabytes_before", "megabytes_after"),
    *("store_megabytes_before", "store_megabytes_after", "seconds", "ratio"),
)


def settled(job: AttackedJob, seconds: float) -> list[dict[str, Any]]:
    """The reports of a quiet time of so many seconds, after a warm-up."""
    job.report()
    time.sleep(seconds)
    return job.report()


def median(reports: list[dict[str, Any]]) -> float:
    return statistics.median(x for each in reports for x in each["times"])


def attack(target: Target, *, messages: int, seed: int) -> dict[str, Any]:
    """Measure a port of a job."""
    draw, function = random.Random(seed), PORTS[target.port]
    job = AttackedJob(target.job, key=target.key, tls=target.tls)
    try:
        job.report()
        quiet = settled(job, 5.0)
        before, store_before, start = job.resources(quiet), job.store_resources(), time.monotonic()
        accepted = sum(function(job, quiet, messages, draw))
        seconds = time.monotonic() - start
        under = job.report()
        time.sleep(11.0)  # until connections without a handshake are closed
        later = job.report()
        after, store_after = job.resources(later), job.store_resources()
    finally:
        job.close()
    changed, compared = sum(each.get("changed", 0) for each in later), sum(each.get("compared", 0) for each in later)
    if target.job == "membership":
        found = recorded_in([*quiet, *under, *later])
        reference = reference_to(max(step for _, step in found))
        changed, compared = sum(found[each] != reference[each] for each in found), len(found)
    return {
        "messages": messages,
        "accepted": accepted,
        "changed": changed,
        "compared": compared,
        "steps": sum(len(each["times"]) for each in under),
        "same_members": len({each.get("members") for each in [*quiet, *later]}) == 1,
        "descriptors_before": before[0],
        "descriptors_after": after[0],
        "megabytes_before": round(before[1] / 1e6, 1),
        "megabytes_after": round(after[1] / 1e6, 1),
        "store_megabytes_before": round(store_before[1] / 1e6, 1),
        "store_megabytes_after": round(store_after[1] / 1e6, 1),
        "seconds": round(seconds, 1),
        "ratio": round(median(under) / median(quiet), 3),
    }


_reference: dict[tuple[int, int], int] = {}


def reference_to(last: int) -> dict[tuple[int, int], int]:
    """The records up to a step of a job without strangers and without a key; one job is enough for many ports."""

    def is_complete() -> bool:
        return all((rank, step) in _reference for rank in range(3) for step in range(EVERY, last + 1, EVERY))

    if is_complete():
        return _reference
    job = AttackedJob("membership", key=False)
    try:
        while not is_complete():
            time.sleep(1.0)
            _reference.update(recorded_in(job.report()))
    finally:
        job.close()
    return _reference


def recorded_in(reports: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
    """The records by rank and step."""
    return {(each["rank"], step): x for each in reports if "records" in each for step, x in each["records"].items()}


def sniff(target: Target) -> dict[str, Any]:
    """Read the packets between the workers of dpwa, and count those that tell something."""
    job = AttackedJob(target.job, key=target.key, tls=target.tls)
    ports = {int(address.rpartition(":")[2]) for address in job.peers.values()}
    secrets = (struct.pack("<4f", *[VALUE] * 4), KEY.encode())
    num_packets = num_learnt = 0
    try:
        job.report()
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.ntohs(0x0800)) as sniffer:
            sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
            sniffer.bind(("lo", 0x0800))
            sniffer.settimeout(0.2)
            end = time.monotonic() + SNIFF_SECONDS
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    packet = sniffer.recv(1 << 17)
                    length = 4 * (packet[0] & 15)  # of the header of IP
                    is_ours = packet[9] == socket.IPPROTO_TCP and ports & {*struct.unpack_from("!2H", packet, length)}
                    if is_ours:
                        num_packets += 1
                        num_learnt += any(secret in packet for secret in secrets)
        steps = sum(len(each["times"]) for each in job.report())
    finally:
        job.close()
    return {"messages": num_packets, "learnt": num_learnt, "steps": steps, "seconds": SNIFF_SECONDS}


def cost(target: Target, repeats: int) -> dict[str, Any]:
    """The median time of a step with a key or TLS beside that without, of two jobs that train side by side."""
    times: dict[bool, list[float]] = {False: [], True: []}
    jobs = {
        is_safe: AttackedJob(target.job, key=target.key and is_safe, tls=target.tls and is_safe) for is_safe in times
    }
    start = time.monotonic()
    try:
        for job in jobs.values():
            job.report()
        for job in jobs.values():
            job.report()  # what was before the other one had begun
        for _ in range(repeats):
            time.sleep(5.0)
            for is_safe, job in jobs.items():
                times[is_safe] += [x for each in job.report() for x in each["times"]]
    finally:
        for job in jobs.values():
            job.close()
    return {
        "messages": 0,
        "steps": len(times[True]),
        "seconds": round(time.monotonic() - start, 1),
        "ratio": round(statistics.median(times[True]) / statistics.median(times[False]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=50_000, help="at each port")
    parser.add_argument("--repeats", type=int, default=12, help="windows of 5 s, for the cost of the key and of TLS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "strangers.csv")
    options = parser.parse_args()
    done = {Target(*row) for row in rows_in(options.output, COLUMNS)[list(Target._fields)].itertuples(index=False)}
    for target in TARGETS:
        if target in done or not (options.repeats or target.port != "none"):
            continue
        if target.port == "none":
            found = cost(target, options.repeats)
        else:
            found = (
                sniff(target) if target.port == "wire" else attack(target, messages=options.messages, seed=options.seed)
            )
        row = dict.fromkeys(COLUMNS) | target._asdict() | found
        print(row, flush=True)
        append_row(options.output, row, seed=options.seed)


if __name__ == "__main__":
    main()
