"""GroupParticipant: what a wrapper with wait-avoiding rounds does when workers come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..graph_manager.butterfly_groups import ButterflyGroups
from ..membership.links import LinkTransport
from ..membership.participant import ModelParticipant
from ..wrappers.arguments import as_whole
from .control import control_peers


def choose_groups(group_size: int | None) -> Callable[[int], ButterflyGroups]:
    """The groups for any number of workers: of `group_size`, or of as many as there are, down to a power of two.

    Args:
        group_size: a power of two; None: see `default_group_size`.

    Raises:
        ValueError: it is none, or 1.
    """
    if group_size is not None and (as_whole(group_size, name="group_size") < 2 or group_size.bit_count() != 1):
        raise ValueError(
            f"got group_size={group_size!r} with a membership, expected a power of two from 2 on, or None; "
            "GossipDataParallel with schedule=Schedule(gossip_every=H, average_every=1) is local SGD, and takes one"
        )

    def choose(n: int) -> ButterflyGroups:
        return ButterflyGroups(n, group_size=group_size and min(group_size, 1 << n.bit_length() - 1))

    return choose


def check_threads(wait_avoiding: bool) -> None:
    """Raise ValueError for rounds without threads, which have no place where a round may end without a member."""
    if not wait_avoiding:
        raise ValueError(
            "got wait_avoiding=False with a membership, expected True: a group that waits for its members would lose "
            "part of a sum with each that dies; for rounds in lockstep take GossipDataParallel with a membership"
        )


class GroupParticipant(ModelParticipant):
    """Between a `GroupAverageDataParallel` and its membership; see [Note: generations of WAGMA].

    Steps are rounds. All messages go over the group of all ranks, as whoever is lost ends all rounds of a generation;
    a worker watches those from which it gets control messages.
    """

    def _turn_to(self, transport: LinkTransport, growth: float) -> None:
        """See `ModelParticipant`."""
        self.wrapper._engine.rebind(transport, self.wrapper._buffer.vector)
        self.wrapper._averager.transport = transport

    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """See `Participant`."""
        out_peers, in_peers = control_peers(rank, world_size)
        return {*out_peers, *in_peers}

    def links(self, rank: int, world_size: int) -> Iterable[int]:
        """See `Participant`."""
        return ()

    @property
    def is_cut_off(self) -> bool:
        """See `Participant`."""
        return bool(self.wrapper._engine.is_cut_off)

    def skipped(self) -> int:
        """See `Participant`."""
        return int(self.wrapper._engine.skipped())

    @property
    def step(self) -> int:
        """See `Participant`."""
        return int(self.wrapper._engine.t)

    def advance(self, num_steps: int) -> None:
        """See `Participant`."""
        self.wrapper._engine.t += num_steps

    def _go_to(self, t: int, step: int) -> None:
        """See `ModelParticipant`."""
        self.wrapper._engine.restart(self.wrapper._buffer.vector, t)
