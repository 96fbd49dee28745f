"""n ranks in one thread: a gossiper of any kind is run on all of them at once, for the simulator and for tests."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..algorithms.d_psgd import DPSGD
from ..flat.vector import FlatVector
from ..graph_manager.static_graphs import RingGraph
from ..mixing_manager.base import MetropolisHastingsMixing, MixingManager
from ..rounds.gossiper import Gossiper
from ..rounds.stacked import Stacked
from ..rounds.vector import Vector
from ..rounds.vectors import SGDStep
from ..simulate.codes import CODE_PASSES, UNKNOWN_PASSES
from ..simulate.delays import LinkModel, MessageCost

SAMPLE_ENTRIES = 1 << 16  # of the model whose messages are measured


class Post:
    """The messages on their way between the ranks of one thread, by (sender, receiver, tag), each in its order."""

    def __init__(self) -> None:
        self.messages: defaultdict[tuple[int, int, int], deque[list[Tensor]]] = defaultdict(deque)


class Delivery:
    """A round of one rank: `wait` copies what the others have sent, who must have posted it. See `Pending`."""

    def __init__(self, post: Post, rank: int, recvs: Mapping[int, Sequence[Tensor]], tag: int) -> None:
        self._post, self._rank, self._recvs, self._tag = post, rank, dict(recvs), tag

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Pending`."""
        for peer, tensors in self._recvs.items():
            messages = self._post.messages[peer, self._rank, self._tag]
            assert messages, f"rank {self._rank} waits for a message of rank {peer} that was not posted"
            for mine, theirs in zip(tensors, messages.popleft(), strict=True):
                mine.copy_(theirs)
        self._recvs = {}

    def arrivals(self) -> Iterator[int]:
        """See `Pending`."""
        num_tensors = max((len(tensors) for tensors in self._recvs.values()), default=0)
        self.wait()
        yield from range(num_tensors)


class OneThreadTransport:
    """A `Transport` of one of n ranks that live in the same thread: all post a round before any of them waits for it.

    Args:
        post: shared by the n ranks.
        rank: of this one.
        world_size: n.
    """

    device = torch.device("cpu")

    def __init__(self, post: Post, rank: int, world_size: int) -> None:
        self._post = post
        self.rank, self.world_size = rank, world_size
        self.names: Sequence[int] = range(world_size)
        self.num_bytes_sent = 0

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        recvs: Mapping[int, Sequence[Tensor]],
        *,
        tag: int,
        what: str = "",
        fill: Callable[[int], None] | None = None,
    ) -> Delivery:
        """See `Transport`; what is sent is copied here."""
        if fill is not None:
            for index in range(max((len(tensors) for tensors in sends.values()), default=0)):
                fill(index)
        for peer, tensors in sends.items():
            self._post.messages[self.rank, peer, tag].append([x.clone() for x in tensors])
            self.num_bytes_sent += sum(x.numel() * x.element_size() for x in tensors)
        return Delivery(self._post, self.rank, recvs, tag)

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`.

        Raises:
            NotImplementedError: always; so do the other collectives.
        """
        self._refuse(what)

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `Transport`."""
        self._refuse(what)

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        self._refuse(what)

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"got a collective ({what}) among ranks of one thread, where it would wait for ever, expected exchanges "
            "only; use gossip_modules.testing.run_ranks, which gives each rank a thread"
        )


class OneThread(Stacked):
    """Runs a gossiper itself on the rows of one tensor, one copy for each rank.

    Args:
        make: makes a new gossiper.
        mixing: W(t).
        overlap: see `Stacked`.

    Raises:
        ValueError: its rounds have several phases, so that one thread cannot run them for all ranks; or it does not
            suit these weights.
    """

    def __init__(self, make: Callable[[], Gossiper], mixing: MixingManager, *, overlap: bool = False) -> None:
        super().__init__(DPSGD(), mixing, overlap=overlap)
        self.transports = make_transports(self.num_ranks)
        self.gossipers = [make() for _ in self.transports]
        for gossiper, transport in zip(self.gossipers, self.transports, strict=True):
            gossiper.bind(mixing, transport)
        first = self.gossipers[0]
        if first.num_phases != 1:
            raise ValueError(
                f"got {first} with rounds of {first.num_phases} phases, expected one phase; write an `Algorithm`, "
                "whose rounds may have several"
            )
        self.weights = None if first.needs_symmetric_weights else self.weights

    def run(self, x: Vector, k: int, sgd: SGDStep | None = None) -> None:
        """See `Stacked`."""
        before = sum(transport.num_bytes_sent for transport in self.transports)
        after = x.parts[0].clone()
        vectors = [FlatVector.over(row) for row in after]
        for gossiper, s in zip(self.gossipers, vectors, strict=True):
            gossiper.start(s, self.t)
        for gossiper, s in zip(self.gossipers, vectors, strict=True):
            gossiper.finish(s)
        x.set_(Vector([after]))
        if self.weights is not None:
            self.weights = self.rows.mix(self.weights)
        sent = sum(transport.num_bytes_sent for transport in self.transports)
        self.sent_bytes += (sent - before) / self.num_ranks
        self._answered.append(self.rows)


def make_transports(world_size: int) -> list[OneThreadTransport]:
    """The transports of all ranks, connected to each other."""
    post = Post()
    return [OneThreadTransport(post, rank, world_size) for rank in range(world_size)]


def measured_message(driver: Stacked, num_parameters: int, links: LinkModel) -> MessageCost:
    """What a message takes: its bytes on a model of 65,536 float32 parameters, for `num_parameters`.

    Its time to encode and decode is that of its compressor, if it has one that was measured, else that of a slow one.

    Args:
        driver: of two ranks; before its first step.
        num_parameters: of the real model.
        links: tell how long a pass over the model takes.
    """
    sample = torch.randn(2, SAMPLE_ENTRIES, generator=torch.Generator().manual_seed(0), device="cpu")
    driver.step(sample, 0)
    owner: Any = driver.gossipers[0] if isinstance(driver, OneThread) else driver.algorithm
    code: type[Any] = type(getattr(owner, "compressor", None))
    encode, decode = CODE_PASSES.get(code, UNKNOWN_PASSES)
    one_pass = links.memory_seconds(4 * num_parameters)
    num_bytes = driver.sent_bytes * num_parameters / SAMPLE_ENTRIES
    return MessageCost(num_bytes, encode_seconds=(encode + decode) * one_pass, decode_seconds=decode * one_pass)


def pair() -> MixingManager:
    """The weights of two ranks."""
    return MetropolisHastingsMixing(RingGraph(2))
