"""How long computing and sending take on each of n ranks: the delays of a simulated cluster, all drawn from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from ..rounds.rows import Array, Indices, Rows

TCP_SHARE = 0.957
"""Of the line rate: what TCP/IP headers leave, of Ethernet frames of 1,500 bytes."""
_RANKS, _STEPS, _LINKS = range(3)  # what a draw is for


@dataclass(frozen=True)
class ComputeModel:
    """Seconds of one training step of a rank, communication aside.

    A step takes overhead_seconds + seconds * (speed of the rank) * (luck of the step), in which forward takes a third
    of `seconds` and backward the rest. Both factors are log-normal with median 1. A pure function of (seed, step): all
    methods meet the same delays.

    Args:
        seconds: forward and backward, of a rank of median speed, above 0.
        overhead_seconds: loading, optimizer and the like, in front of the forward.
        rank_spread: standard deviation of the logarithm of a rank's speed, the same for all its steps.
        step_spread: the same of each step.
        straggle_share: probability that a step straggles, 0 to 1.
        straggle_factor: how many times longer it takes then, at least 1.
        slow_rank_factor: how many times longer all steps of rank 0 take, at least 1.
        seed: of all draws.

    Raises:
        ValueError: a number out of range.

    >>> ComputeModel(seconds=0.25, straggle_share=0.5, straggle_factor=10).step_seconds(0, num_ranks=4).tolist()
    [2.5, 2.5, 0.25, 2.5]
    """

    seconds: float
    overhead_seconds: float = 0.0
    rank_spread: float = 0.0
    step_spread: float = 0.0
    straggle_share: float = 0.0
    straggle_factor: float = 10.0
    slow_rank_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self, positive={"seconds"}, at_least_one={"straggle_factor", "slow_rank_factor"})
        check_share("straggle_share", self.straggle_share)

    @property
    def is_uneven(self) -> bool:
        """Whether steps of equal work take unequal times."""
        spreads = self.rank_spread or self.step_spread or self.straggle_share
        return bool(spreads) or self.slow_rank_factor > 1

    def rank_factors(self, num_ranks: int) -> Array:
        """The median step of each rank, as a multiple of the step of a rank of median speed: float64 [n]."""
        factors = np.exp(self.rank_spread * _generator(self.seed, _RANKS, 0).standard_normal(num_ranks))
        factors[0] *= self.slow_rank_factor
        return factors

    def compute_seconds(self, step: int, *, num_ranks: int) -> Array:
        """Forward and backward of each rank in its step number `step`: float64 [n]."""
        draw = _generator(self.seed, _STEPS, step)
        factors = self.rank_factors(num_ranks) * np.exp(self.step_spread * draw.standard_normal(num_ranks))
        factors[draw.random(num_ranks) < self.straggle_share] *= self.straggle_factor
        return self.seconds * factors

    def step_seconds(self, step: int, *, num_ranks: int) -> Array:
        """The whole step of each rank: float64 [n]."""
        return self.overhead_seconds + self.compute_seconds(step, num_ranks=num_ranks)


@dataclass(frozen=True)
class LinkModel:
    """Seconds of messages: every rank has one full-duplex link to a switch that never congests.

    Args:
        rate_bit_s: line rate of a link, above 0; `TCP_SHARE` of it carries data.
        latency_s: of a message, one way, with what the software takes for it.
        slow_share: share of ranks whose link is slow, 0 to 1; at least one rank if above 0.
        slow_factor: how many times slower it is, at least 1.
        memory_byte_s: bytes of a model that a rank reads or writes per second when it copies and mixes, above 0. A
            message is three such passes, overlap is two more in training's way. The default reproduces the
            measurements on the emulated cluster; on a GPU it is hundreds of times more.
        seed: of the choice of slow links.

    Raises:
        ValueError: a number out of range.

    >>> round(LinkModel(rate_bit_s=1e9).wire_seconds(44.7e6), 4)  # 11.2 M parameters in float32
    0.3737
    """

    rate_bit_s: float
    latency_s: float = 1e-4
    slow_share: float = 0.0
    slow_factor: float = 10.0
    memory_byte_s: float = 9e9
    seed: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self, positive={"rate_bit_s", "memory_byte_s"}, at_least_one={"slow_factor"})
        check_share("slow_share", self.slow_share)

    def wire_seconds(self, num_bytes: float) -> float:
        """How long a link of full rate is busy with so many bytes one way, without latency."""
        return 8 * num_bytes / (self.rate_bit_s * TCP_SHARE)

    def memory_seconds(self, num_bytes: float) -> float:
        """One pass over so many bytes of memory."""
        return num_bytes / self.memory_byte_s

    def slowness(self, num_ranks: int) -> Array:
        """1 for a link of full rate, `slow_factor` for a slow one: float64 [n]."""
        slowness = np.ones(num_ranks)
        num_slow = math.ceil(self.slow_share * num_ranks)
        slowness[_generator(self.seed, _LINKS, 0).permutation(num_ranks)[:num_slow]] = self.slow_factor
        return slowness


class MessageCost(NamedTuple):
    """What a rank says to one peer in one exchange.

    num_bytes: on the wire.
    encode_seconds: before it leaves, once however many peers get it.
    decode_seconds: after it has come, for each one.
    """

    num_bytes: float
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


class Network:
    """Links of n ranks, and how long messages take on them.

    Args:
        links: their model.
        num_ranks: n.
    """

    def __init__(self, links: LinkModel, num_ranks: int) -> None:
        self.links, self.num_ranks = links, num_ranks
        self.slowness = links.slowness(num_ranks)

    def plain_message(self, num_bytes: float) -> MessageCost:
        """The model as it is; to mix it takes three passes: read the message, read and write the own model."""
        return MessageCost(num_bytes, decode_seconds=3 * self.links.memory_seconds(num_bytes))

    def exchange_seconds(self, round_: Rows, message: MessageCost) -> Array:
        """From when a rank and its in-peers have encoded until the rank has mixed their messages: float64 [n].

        A link carries all the messages of its rank, those out beside those in; a rank waits for the slowest of its
        own incoming ones and of its in-peers' outgoing ones.
        """
        outgoing, incoming = self.slowness * round_.out_degrees, self.slowness * round_.in_degrees
        sent = np.where(round_.is_peer, outgoing[round_.peers], 0.0).max(axis=1, initial=0.0)
        seconds = self.links.wire_seconds(message.num_bytes) * np.maximum(sent, incoming)
        seconds += message.decode_seconds * round_.in_degrees + self.links.latency_s
        return np.where(round_.in_degrees > 0, seconds, 0.0)

    def pair_seconds(self, ranks: Indices, peers: Indices, message: MessageCost) -> Array:
        """One message from each of `peers` to each of `ranks`, with nothing else on their links, and mixing it."""
        slowness = np.maximum(self.slowness[ranks], self.slowness[peers])
        fixed = self.links.latency_s + message.decode_seconds
        return self.links.wire_seconds(message.num_bytes) * slowness + fixed

    def all_reduce_seconds(self, num_bytes: float) -> float:
        """A ring all-reduce of all ranks: 2 (n - 1) / n of the bytes, and 2 (n - 1) latencies one after another."""
        num_hops = 2 * (self.num_ranks - 1)
        wire = self.links.wire_seconds(num_bytes) * float(self.slowness.max())
        return num_hops * (wire / self.num_ranks + self.links.latency_s)

    def gather_seconds(self, num_bytes: float) -> float:
        """A ring in which every rank gets so many bytes of each of the others: n - 1 messages one after another."""
        wire = self.links.wire_seconds(num_bytes) * float(self.slowness.max())
        return (self.num_ranks - 1) * (wire + self.links.latency_s)


def check(name: str, value: object, is_good: bool, expected: str) -> None:
    """Raise a ValueError that names the value unless it is good."""
    if not is_good:
        raise ValueError(f"got {name}={value}, expected {expected}")


def check_share(name: str, value: float) -> None:
    """Raise a ValueError unless the value is from 0 to 1."""
    check(name, value, 0 <= value <= 1, "a share from 0 to 1; give 0.1 for one in ten")


def _check_numbers(model: ComputeModel | LinkModel, *, positive: set[str], at_least_one: set[str]) -> None:
    for field in fields(model):
        name, value = field.name, getattr(model, field.name)
        least, expected = 0, "a number of at least 0"
        if name in at_least_one:
            least, expected = 1, "a number of at least 1"
        elif name in positive:
            least, expected = np.nextafter(0, 1), "a positive number"
        unit = "; its unit is in its name" if name.endswith("_s") or "seconds" in name else ""
        check(name, value, least <= value < math.inf, expected + unit)


def _generator(seed: int, what: int, step: int) -> np.random.Generator:
    return np.random.default_rng((seed, what, step))
