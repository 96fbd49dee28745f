"""What several tests of this folder share."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from gossip_modules.dpwa.averager import PairwiseAverager
from gossip_modules.dpwa.config import PairwiseConfig
from gossip_modules.dpwa.protocol import MessageHeader
from gossip_modules.dpwa.wrapper import PairwiseDataParallel
from tests.harness.progress import engine_of
from tests.harness.strangers import answer

ANY_PORT = "tcp://127.0.0.1:*"


TIMEOUT = timedelta(seconds=20)  # of rounds that do not wait for it


REFUSED = "tcp://127.0.0.1:1"  # where nobody listens


def averager(
    workers: contextlib.ExitStack,
    name: str,
    module: nn.Module,
    *,
    address: str = ANY_PORT,
    peers: Mapping[str, str] | None = None,
    init_from_peers: bool = False,
    **options: Any,
) -> PairwiseAverager:
    """A worker at a free port that knows nobody else yet."""
    config = PairwiseConfig(name, {name: address, **(peers or {})}, **{"timeout": TIMEOUT, **options})
    worker = PairwiseAverager(module, config, init_from_peers=init_from_peers)
    workers.callback(worker.close)
    return worker


def wrap(workers: contextlib.ExitStack, name: str, module: nn.Module, **options: Any) -> PairwiseDataParallel:
    """The same as a wrapper."""
    options = {"peers": {name: ANY_PORT}, "timeout": TIMEOUT, "init_from_peers": False, **options}
    worker = PairwiseDataParallel(module, name=name, **options)
    workers.callback(worker.close)
    return worker


def introduce(*group: tuple[str, PairwiseAverager | PairwiseDataParallel]) -> None:
    """Everybody knows everybody from now on."""
    for name, worker in group:
        for other_name, other in group:
            if other_name != name:
                worker.add_peer(other_name, other.address)


def filled(value: float, numel: int = 50, dtype: torch.dtype = torch.float32) -> nn.Module:
    """One parameter with this value in every element."""
    module = nn.Linear(numel, 1, bias=False, dtype=dtype)
    nn.init.constant_(module.weight, value)
    return module


def value_of(module: nn.Module) -> float:
    """The value that all elements have."""
    parameter = next(module.parameters()).detach()
    assert torch.equal(parameter, torch.full_like(parameter, parameter.flatten()[0].item()))
    return parameter.flatten()[0].item()


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max((x.double() - y.double()).abs().max().item() for x, y in pairs if x.is_floating_point())


def has_fetched(worker: PairwiseDataParallel) -> bool:
    """Whether the next forward can merge what is under way."""
    return bool(engine_of(worker).fetcher.is_done)


def ask_first(worker: PairwiseAverager, peer: str) -> None:
    """The next round asks this peer before all others."""
    engine_of(worker).scores.answered(peer)


def scores_of(worker: PairwiseAverager) -> dict[str, int]:
    """The score of each peer."""
    records = worker.state_dict()["peers"]["records"]
    return {peer: record["score"] for peer, record in records.items()}


def wait_for(condition: Callable[[], bool]) -> None:
    """Until something that a thread does has happened."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.001)


# Peers that are late, gone or back.


@contextlib.contextmanager
def silent_peer(reply: Callable[[MessageHeader], bytes] | None = None) -> Iterator[str]:
    """The address of a peer that never answers, or answers each request with these bytes and closes."""
    listener, open_ends = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def serve() -> None:
        with contextlib.suppress(OSError):  # the end of the test
            while True:
                client, _ = listener.accept()
                open_ends.append(client)
                if reply is not None:
                    client.sendall(reply(answer(client)))
                    client.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in (listener, *open_ends):
            one.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
