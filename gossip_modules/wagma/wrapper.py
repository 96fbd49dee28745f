"""GroupAverageDataParallel: WAGMA-SGD, averages in small groups without waiting for late members."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.background import close_at_program_end
from ..engine.lockstep import LockstepEngine
from ..engine.overlap import Overlap
from ..flat.nonfinite import check_policy
from ..flat.selection import Selection
from ..graph_manager.butterfly_groups import ButterflyGroups
from ..membership.membership import Membership
from ..old_names import takes_old_arguments
from ..rounds.mixer import GlobalAverage
from ..schedule import Schedule
from ..transport.process_group import DEFAULT_TIMEOUT
from ..wrappers.arguments import Links, as_timeout, as_whole, check_flags, group_of
from ..wrappers.base import GossipWrapper, close_when_collected
from ..wrappers.composition import check_whole
from ..wrappers.participant import Participant, check_links
from .engine import WaitAvoidingEngine
from .group_average import GroupAverage
from .worker import control_peers


class GroupAverageDataParallel(GossipWrapper):
    """WAGMA-SGD: averages models in changing groups of S ranks; a late rank counts with its previous model.

    The first rank at the end of a step starts the group averages of that step on all ranks, in background threads. A
    later rank contributes its published model, from the end of its previous step, and merges its new model with the
    newest average. In every `sync_period`-th round all ranks wait for each other and average over all. This bounds the
    age of a contribution. See `ButterflyGroups` and the notes of `WaitAvoidingEngine`; where that differs from the
    paper is said in [Note: stragglers] of `WaitAvoidingEngine`. Optimizer state is not averaged.

    Special cases, as in the paper:

    - `group_size=1`: local SGD with an average over all ranks every `sync_period` steps.
    - `wait_avoiding=False`: blocking averages in groups, in the training thread. With `group_size=2, sync_period=0`
      like D-PSGD.
    - `group_size=2, sync_period=0`: like AD-PSGD, though a pair waits for whoever of all ranks is first.

    The first training forward, and the first after a checkpoint was loaded, wait until all ranks have come. Load it on
    all ranks, before training or after `settle()`.

    A fast rank does more of the work: slow ranks skip rounds. So let training last an equal number of rounds on all
    ranks, as in the example; each rank ends it in the same round. Call `settle()` on all ranks before a common
    checkpoint; `averaged()` and its like call it.

    Call `settle()` before a collective of your own too (`dist.barrier()`, an `all_reduce` of the loss). Since ranks
    skip rounds, some come to an average over all ranks in an earlier step than others. Such a rank waits there for a
    rank in your collective, and that rank waits for it, until the timeout. A rank in `settle()` takes part in the
    averages of the training ranks. With `wait_avoiding=False` ranks are always in the same round, and nothing need be
    called.

    End with `close()` on all ranks. It settles if training went on since `settle()`, so that no rank leaves while
    others need it; loops of equal length may end in it too. It waits as long as the others take steps. In the handler
    of an exception it leaves at once, and the others fail with an error with the name of this rank. The end of a
    program without `close()` closes too, within the timeout.

    When a rank dies or is stopped, all others fail with an error with its name: at once if its connections close, and
    within the timeout if it only stops answering. With `membership` they train on, see below.

    Li et al., "Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group Averaging",
    IEEE TPDS 2021, arXiv 2005.00124, Algorithm 2. `WaitAvoidingEngine` in wagma/engine.py shows a round as pseudo-code.

    Args:
        module: the model, on its device. Its trained tensors become views of one flat vector.
        group_size: S, a power of two; None = about the square root of the world, see `default_group_size`.
        sync_period: the number of rounds from one average over all ranks to the next; 0 = no such averages.
        wait_avoiding: whether a group does not wait for late members; False blocks, as do groups of one rank.
        overlap: whether a group's average is taken one step later, by the law x <- x + (average - y), instead of being
            waited for. Not in the paper.
        init_sync: whether all ranks begin with the model of rank 0, its buffers included; with a membership they do.
        gossip_buffers: whether group averages include running statistics (BatchNorm); a sequence of names or patterns
            = those floating-point buffers in their place; see `Selection`.
        ignore: names of parameters and buffers to leave local, also at the start, such as "head.bias", or patterns,
            such as "adapter.*"; in addition to the module's `_ddp_params_and_buffers_to_ignore`.
        gossip_in_eval_mode: whether a forward in eval mode counts as one of training where grad is enabled, for
            frozen BatchNorm statistics.
        rounds: when rounds run: see `GossipDataParallel`.
        process_group: a group without other traffic, and of Gloo if wait-avoiding; None = a new one over all ranks.
        device_mesh: as for `GossipDataParallel`.
        comm_device: "cpu" sends GPU parameters through pinned memory, as wait-avoiding always does; None = the GPU if
            the group has NCCL.
        timeout: the time limit of a wait for a peer; a number means seconds.
        membership: a `Membership`, where workers may die and join; it has the timeout then. There are groups
            for any number of workers, see [Note: generations of WAGMA] of `WaitAvoidingEngine`. `close()` does not
            wait.
        on_nonfinite: the reaction to infinities or NaN in the model. "raise": FloatingPointError at the rank with it,
            before others get it; for them the rank has left. "spread": do not look.

    Raises:
        ValueError: invalid arguments, or ranks with different models or options.
        RuntimeError: torch.distributed is not initialised.
        TimeoutError, ConnectionError: (construction, forward, `settle()`) a peer is late or gone; names it.

    Example:
        >>> model = GroupAverageDataParallel(model)  # was: DistributedDataParallel(model)
        >>> while model.round < num_rounds:
        ...     x, y = next(batches)
        ...     loss = criterion(model(x), y)  # averages, then computes
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> model.close()
    """

    @takes_old_arguments()
    def __init__(
        self,
        module: nn.Module,
        *,
        group_size: int | None = None,
        sync_period: int = 10,
        wait_avoiding: bool = True,
        overlap: bool = False,
        init_sync: bool = True,
        gossip_buffers: bool | Sequence[str] = True,
        ignore: Sequence[str] = (),
        process_group: dist.ProcessGroup | None = None,
        device_mesh: dist.DeviceMesh | None = None,
        comm_device: torch.device | str | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        membership: Membership | None = None,
        gossip_in_eval_mode: bool = False,
        rounds: str = "forward",
        on_nonfinite: str = "raise",
    ) -> None:
        process_group = group_of(process_group, device_mesh)
        flags: dict[str, Any] = {"gossip_in_eval_mode": gossip_in_eval_mode, "rounds": rounds}
        selection = Selection(gossip_buffers, ignore)
        super().__init__(module, selection=selection, **flags)
        check_flags(wait_avoiding=wait_avoiding, overlap=overlap)
        if as_whole(sync_period, name="sync_period") < 0:
            raise ValueError(f"got sync_period={sync_period}, expected at least 0; 0 = no averages over all ranks")
        local = self._local
        local.description = {
            "groups": f"ButterflyGroups(n, group_size={group_size})",
            "sync_period, wait_avoiding, overlap": str((sync_period, wait_avoiding, overlap)),
            "init_sync, comm_device": str((init_sync, str(comm_device))),
            "gossip_buffers, ignore": str((selection.gossip_buffers, selection.ignore)),
            "gossip_in_eval_mode, on_nonfinite": str((gossip_in_eval_mode, check_policy(on_nonfinite))),
        }
        timeout = as_timeout(timeout)
        links = Links(process_group, comm_device=comm_device, timeout=timeout)
        if membership is not None:
            check_links(membership, group=process_group, init_sync=init_sync, comm_device=comm_device, timeout=timeout)
            _check_elastic(group_size, wait_avoiding=wait_avoiding)
            # Steps are rounds. All messages go over the group of all ranks, as a lost worker ends all rounds of a
            # generation; a worker watches the ranks from which it gets control messages.
            choose = choose_groups(group_size)
            check_whole(module, what="a membership")
            local.world = Participant(local, membership, choose, peers=_watched, has_links=False)
            groups = choose(1)
        else:
            local.place = links.place
            groups = ButterflyGroups(local.place[1], group_size=group_size)
            local.description["groups"] = str(groups)
            wait_avoiding = wait_avoiding and groups.group_size > 1
            self._open(_of_threads(links) if wait_avoiding else links, init_sync=init_sync)
        self.register_load_state_dict_post_hook(_publish_loaded)
        options: dict[str, Any] = {"on_nonfinite": on_nonfinite}
        if not wait_avoiding:
            average, schedule = GroupAverage(groups, local.transport), Schedule(average_every=sync_period)
            engine = LockstepEngine(average, schedule, overlap=Overlap() if overlap else None, **options)
            self._start(engine, GlobalAverage(local.transport))
            return
        options |= {"sync_period": sync_period, "overlap": overlap}
        waiting = WaitAvoidingEngine(groups, local.transport, local.buffer.vector, **options)
        try:
            self._start(waiting, GlobalAverage(local.transport))
        except BaseException:
            waiting.close()
            raise
        close_when_collected(self, waiting)
        if membership is None:
            close_at_program_end(self, seconds=timeout.total_seconds())

    @property
    def round(self) -> int:
        """How far training is: this rank's rounds, skipped ones included."""
        return self._local.engine.t

    @property
    def is_closed(self) -> bool:
        """Whether `close()` was called."""
        return self._local.is_closed

    @torch.no_grad()
    def settle(self) -> None:
        """On return all ranks are in the same round and nothing is in flight on any of them; collective.

        Until all have called it, this rank takes part in the others' averages over all ranks.
        """
        self._settle(is_patient=False)

    def _settle(self, *, is_patient: bool) -> None:
        self.flush()
        engine = self._local.engine
        if not isinstance(engine, WaitAvoidingEngine) or self.is_closed:
            return
        if engine.settle(self._local.vector, is_patient=is_patient):
            self._local.written()

    @property
    def _bytes_sent(self) -> int:
        engine = self._local.engine
        control = engine.worker.control.num_bytes_sent if isinstance(engine, WaitAvoidingEngine) else 0
        return super()._bytes_sent + int(control)

    @torch.no_grad()
    def close(self) -> None:
        """See `AveragingMixin` and above: settles first, or leaves at once in the handler of an exception."""
        engine = self._local.engine
        if not self.is_closed and isinstance(engine, WaitAvoidingEngine) and not self._local.world.changes:
            error = sys.exc_info()[1]
            if error is not None:
                engine.close(error=error)
            elif not engine.is_settled and not engine.worker.liveness.has_failed:
                try:
                    self._settle(is_patient=True)
                except BaseException as failure:
                    engine.close(error=failure)
                    super().close()
                    raise
        super().close()


def _of_threads(links: Links) -> Links:
    """Return links for ranks with threads that answer at any time."""
    if links.comm_device not in (None, "cpu", torch.device("cpu")):
        raise ValueError(
            f"got comm_device={links.comm_device} with wait_avoiding=True, expected 'cpu' or None: threads that answer "
            "at any time send from CPU memory; pass wait_avoiding=False to stay on the GPU"
        )
    return replace(links, comm_device="cpu", backend="gloo")


def _publish_loaded(module: nn.Module, incompatible_keys: Any) -> None:
    """After `load_state_dict`, when all parameters are there."""
    assert isinstance(module, GroupAverageDataParallel)
    local = module._local
    if isinstance(local.engine, WaitAvoidingEngine):
        module.flush()  # `assign=True` has put other tensors in place of ours
        local.engine.publish_loaded(local.vector)


def _check_elastic(group_size: int | None, *, wait_avoiding: bool) -> None:
    """Raise ValueError for options unfit for a membership."""
    if not wait_avoiding:
        raise ValueError(
            "got wait_avoiding=False with a membership, expected True: a group that waits for its members "
            "would lose part of a sum with each that dies; for rounds in lockstep take GossipDataParallel with "
            "a membership"
        )
    if group_size is not None and (as_whole(group_size, name="group_size") < 2 or group_size.bit_count() != 1):
        raise ValueError(
            f"got group_size={group_size!r} with a membership, expected a power of two from 2 on, or None; "
            "GossipDataParallel with schedule=Schedule(gossip_every=H, average_every=1) is local SGD, and takes one"
        )


def choose_groups(group_size: int | None) -> Callable[[int], ButterflyGroups]:
    """Return groups for any number of workers: of `group_size` or fewer workers, a power of two."""

    def choose(n: int) -> ButterflyGroups:
        return ButterflyGroups(n, group_size=group_size and min(group_size, 1 << n.bit_length() - 1))

    return choose


def _watched(groups: ButterflyGroups, rank: int) -> set[int]:
    """Return the ranks with control messages to or from this rank."""
    out_peers, in_peers = control_peers(rank, groups.world_size)
    return {*out_peers, *in_peers}
