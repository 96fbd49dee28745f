r"""Strangers at all ports of a job: recorded and altered messages while workers train, with and without a key.

    python -m benchmarks.strangers  # 50,000 messages at each job, and the cost of the key
    python -m benchmarks.strangers --messages 2000 --repeats 1 --output quick.csv

Three workers of a membership train on a ring, and two workers of dpwa keep one model. A stranger connects to each port
and sends messages of a worker that it has recorded, as they were or with bytes changed, cut or added. With a key it
also writes values of the store back, old or altered; without one this would be the end of the job, as the guide to
security says.

`accepted` counts the messages that were answered as a worker's; at the ports of Gloo, the connections that took bytes.
`changed` counts the recorded steps after which a model has other bits than in a run without strangers, of `compared`
ones (dpwa: entries that have changed). Descriptors and memory are of all processes of the job together. `ratio` is the
median time of a step under attack beside that of the same job before; where the port is "none", it is that of a job
with the key beside one without, which train side by side. A stranger at full speed takes part of a core from training,
with the key and without.
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
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.record import ROOT, append_rows
from gossip_modules import GossipDataParallel, Membership, PairwiseDataParallel, RingGraph
from gossip_modules.dpwa.protocol import HEADER_BYTES, MessageHeader, MessageKind, ModelShape
from gossip_modules.membership.liveness.contact import HELLO, Contact, Greeting, digest
from gossip_modules.transport.job_key import VARIABLE, Handshake

KEY = "a key of the benchmark"
EVERY = 50  # steps between two records of a model
VALUE = 1234.5
SECONDS = 60.0
HOST = "127.0.0.1"


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


def pair(pipe: Connection, name: str, peers: dict[str, str]) -> None:
    """Keep a model that is equal on both workers."""
    torch.set_num_threads(1)
    net = nn.Linear(100, 100)
    for parameter in net.parameters():
        nn.init.constant_(parameter, VALUE)
    model = PairwiseDataParallel(net, name=name, peers=peers, timeout=timedelta(seconds=5))
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
            pipe.send({"times": times, "resources": resources(), "changed": changed})
            times = []


class AttackedJob:
    """The processes of a job.

    Args:
        kind: "membership" or "dpwa".
        key: whether it has a key.
    """

    def __init__(self, kind: str, *, key: bool) -> None:
        self.kind, self.key = kind, KEY.encode() if key else None
        os.environ.pop(VARIABLE, None)
        if key:
            os.environ[VARIABLE] = KEY  # which the processes inherit
        self.server: subprocess.Popen[str] | None = None
        self.pipes: list[Connection] = []
        self._processes: list[Any] = []
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
            works = [(pair, (name, self.peers)) for name in "ab"]
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
        found = []
        for pipe in self.pipes:
            if not pipe.poll(SECONDS):
                raise TimeoutError(f"a worker of {self.kind} does not train: got no report in {SECONDS} s")
            found.append(pipe.recv())
        return sorted(found, key=lambda each: each.get("rank", 0))

    def resources(self, reports: list[dict[str, Any]]) -> tuple[int, int]:
        """The descriptors and the memory of all processes."""
        all_of = [each["resources"] for each in reports]
        if self.server is not None:
            all_of.append(resources_of(self.server.pid))
        return sum(each[0] for each in all_of), sum(each[1] for each in all_of)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait()


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
    """Old and altered values under the keys of the job, and under keys of generations to come."""
    client = dist.TCPStore(HOST, job.port, is_master=False, wait_for_workers=False)
    keys = [f"gossip/job/{name}" for name in ("roster", "epoch")]
    old = {key: client.get(key) for key in keys}
    for i in range(count):
        key = draw.choice(keys)
        value = altered(old[draw.choice(keys)], draw)
        client.set(key, value.decode(errors="replace"))
        if i % 100 == 0:
            client.add("gossip/job/version", 1)
            time.sleep(0.02)
        yield False


def at_gloo(job: AttackedJob, reports: list[dict[str, Any]], count: int, draw: random.Random) -> Iterator[bool]:
    """Bytes to the other ports at which the workers listen, which drop connections; yields whether one took them."""
    known = {each["contact"][1][1] for each in reports}
    ports = sorted({port for process in job._processes for port in listening(process.pid)} - known)
    for i in range(count):
        num_bytes = 0
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, ports[i % len(ports)]), timeout=0.02) as stranger,
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
        yield bool(answer.strip(b"\0"))  # zeros in place of a code refuse the stranger


PORTS = {
    "membership": {
        "liveness": (at_liveness, 0.5),
        "store": (at_store_port, 0.25),
        "values of the store": (at_store_values, 0.1),
        "gloo": (at_gloo, 0.15),
    },
    "dpwa": {"dpwa": (at_dpwa, 1.0)},
}


def settled(job: AttackedJob, seconds: float) -> list[dict[str, Any]]:
    """The reports of a quiet time of so many seconds, after a warm-up."""
    job.report()
    time.sleep(seconds)
    return job.report()


def median(reports: list[dict[str, Any]]) -> float:
    return statistics.median(x for each in reports for x in each["times"])


def attack(kind: str, *, key: bool, messages: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows for each port of a job."""
    draw, reference = random.Random(seed), dict[tuple[int, int], int]()
    job = AttackedJob(kind, key=key)
    try:
        found = dict[tuple[int, int], int]()
        for port, (function, share) in PORTS[kind].items():
            if port == "values of the store" and not key:
                continue
            quiet = settled(job, 3.0)
            found |= recorded_in(quiet)
            before, start = job.resources(quiet), time.monotonic()
            count = int(messages * share)
            accepted = sum(function(job, quiet, count, draw))
            seconds = time.monotonic() - start
            under = job.report()
            found |= recorded_in(under)
            time.sleep(11.0)  # until connections without a handshake are closed
            later = job.report()
            found |= recorded_in(later)
            after = job.resources(later)
            yield {
                "job": kind,
                "key": key,
                "port": port,
                "messages": count,
                "accepted": accepted,
                "changed": sum(each.get("changed", 0) for each in later),
                "compared": 0,
                "steps": sum(len(each["times"]) for each in under),
                "same_members": len({each.get("members") for each in [*quiet, *later]}) == 1,
                "descriptors_before": before[0],
                "descriptors_after": after[0],
                "megabytes_before": round(before[1] / 1e6, 1),
                "megabytes_after": round(after[1] / 1e6, 1),
                "seconds": round(seconds, 1),
                "ratio": round(median(under) / median(quiet), 3),
            }
    finally:
        job.close()
    if kind == "membership":
        reference_job = AttackedJob(kind, key=key)
        try:
            last = max(step for _, step in found)
            while not reference or max(step for _, step in reference) < last:
                time.sleep(1.0)
                reference |= recorded_in(reference_job.report())
        finally:
            reference_job.close()
        common = found.keys() & reference.keys()
        yield {"changed": sum(found[each] != reference[each] for each in common), "compared": len(common)}


def recorded_in(reports: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
    """The records by rank and step."""
    return {(each["rank"], step): x for each in reports if "records" in each for step, x in each["records"].items()}


def cost(repeats: int) -> dict[str, Any]:
    """The median time of a step with a key beside that without, of two jobs that train side by side."""
    times: dict[bool, list[float]] = {False: [], True: []}
    jobs = {key: AttackedJob("membership", key=key) for key in times}
    try:
        for job in jobs.values():
            job.report()
        for _ in range(repeats):
            time.sleep(5.0)
            for key, job in jobs.items():
                times[key] += [x for each in job.report() for x in each["times"]]
    finally:
        for job in jobs.values():
            job.close()
    return {"key": True, "ratio": round(statistics.median(times[True]) / statistics.median(times[False]), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=50_000, help="at each job")
    parser.add_argument("--repeats", type=int, default=4, help="windows of 5 s, for the cost of the key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "strangers.csv")
    options = parser.parse_args()
    for kind in PORTS:
        for key in (False, True):
            rows: list[dict[str, Any]] = []
            for row in attack(kind, key=key, messages=options.messages, seed=options.seed):
                if "port" in row:
                    rows.append(row)
                else:  # the comparison of all steps of this job
                    rows = [each | row for each in rows]
                print(row, flush=True)
            append_rows(options.output, rows, seed=options.seed)
    if options.repeats:
        row = dict.fromkeys(rows[0], 0) | {"job": "membership", "port": "none", "same_members": True}
        row |= cost(options.repeats)
        print(row)
        append_rows(options.output, [row], seed=options.seed)


if __name__ == "__main__":
    main()
