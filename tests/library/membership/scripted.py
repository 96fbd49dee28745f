"""Workers of generations that a test prescribes, as threads: links to the members of each, and nobody who decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from gossip_modules.graph_manager.named_graphs import undirected_ring
from gossip_modules.membership.links import LinkTransport, connect_links
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.mixing_manager.base import MixingManager
from tests.harness.ranks import TIMEOUT
from tests.library.membership.stores import exchange_over


class Ended(Exception):
    """Raised by a worker: its connections close, as at the end of its process."""


def mixing_of(size: int) -> MixingManager:
    return MetropolisHastingsMixing(undirected_ring(size))


class ScriptedWorker:
    """One worker: its name, and links to the others of its generation, on the graph of `mixing_of`."""

    mixing_of: Callable[[int], MixingManager] = staticmethod(mixing_of)

    def __init__(self, name: int, store: dist.Store) -> None:
        self.name, self.store = name, store
        self.transport: LinkTransport | None = None

    def turn_to(self, mixing: MixingManager, transport: LinkTransport, *, is_first: bool) -> None:
        """Run rounds over this transport from now on."""
        raise NotImplementedError

    def begin(self, generation: int, members: Sequence[int]) -> None:
        """Connect with the members of a generation, which all call it."""
        rank, mixing, old = members.index(self.name), self.mixing_of(len(members)), self.transport
        store = dist.PrefixStore(str(generation), self.store)
        self.transport = connect_links(
            exchange_over(store, rank, len(members)),
            rank,
            len(members),
            mixing.graph.phone_book(rank),
            store=store,
            names=members,
            timeout=TIMEOUT,
            patience=TIMEOUT,
            on_lost=lambda peer, error, is_closed: None,
        )
        self.turn_to(mixing, self.transport, is_first=old is None)
        if old is not None:
            old.close()

    def end(self) -> None:
        """Close what is open."""
        if self.transport is not None:
            self.transport.close()


Scripted = TypeVar("Scripted", bound=ScriptedWorker)


def run_workers(
    bodies: Sequence[Callable[[Scripted], Any]], make: Callable[[int, dist.Store], Scripted]
) -> list[Scripted]:
    """Each body in a thread of its own, on the worker of its index; the workers."""
    store, errors = dist.HashStore(), []
    workers = [make(name, store) for name in range(len(bodies))]
    over = threading.Barrier(len(bodies))

    def run(worker: Scripted) -> None:
        try:
            bodies[worker.name](worker)
            over.wait(2 * TIMEOUT.total_seconds())
        except Ended:
            worker.end()
            over.wait(2 * TIMEOUT.total_seconds())
        except BaseException as error:  # noqa: BLE001 (raised in the thread of the test)
            errors.append(error)
            over.abort()
        finally:
            worker.end()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return workers
