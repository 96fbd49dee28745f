"""The exact average over ranks, on demand: to evaluate, to export, to measure how far ranks are apart."""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..devices import wide_dtype
from ..flat.buffer import FlatBuffer
from ..flat.kept_buffers import KeptBuffers
from ..flat.selection import Selection
from ..flat.sharded import gathered, local_of
from ..flat.vector import FlatVector
from ..loop.copies import WeightCopies
from ..loop.masters import declared_pairs
from ..regions import Regions
from ..rounds.mixer import GlobalAverage
from ..state import Restart, State
from ..transport.agreement import check_agreement
from ..transport.process_group import ProcessGroupTransport, calling
from ..warn import levels_to_user
from ..worlds.world import ALONE, ModelWorld
from .frozen import find_differing, frozen_parameters
from .node import Node
from .state import Place

if TYPE_CHECKING:
    from typing_extensions import Self


class AveragedModel(State, ABC):
    """The model of one rank, as `AveragingMixin` reads and writes it.

    Attributes:
        buffer: has the vector, if the tensors of the module are views of one.
        averager: the exact average over the ranks.
        node: the processes of this model, if there are several.
        world: the other processes of the training.
        is_averaged: whether the parameters are the average, inside `averaged()`.
    """

    buffer: FlatBuffer
    averager: GlobalAverage
    node: Node | None = None
    world: ModelWorld = ALONE
    is_averaged = False

    @property
    def copies(self) -> WeightCopies | None:
        """The copies of the parameters in the hands of optimizers; None: there is nothing to bring to them."""
        return None

    @property
    def selection(self) -> Selection:
        """The averaged tensors, and the local tensors."""
        return self.buffer.selection

    @property
    def trained(self) -> Sequence[Tensor]:
        """The trained parameters of the module."""
        return self.buffer.parameters

    @property
    def exchanged_tensors(self) -> Sequence[Tensor]:
        """The tensors that rounds exchange."""
        return self.buffer.tensors

    @abstractmethod
    def read(self) -> FlatVector:
        """The trained tensors (numerators, with their weight), nothing in flight: live storage or a packed copy."""

    @abstractmethod
    def write(self, vector: FlatVector) -> None:
        """The trained tensors <- the estimate of a vector that `read` gave. Always follows `read`."""

    @property
    def rank(self) -> int:
        """This rank among the averaging ranks."""
        return self.averager.transport.rank

    @property
    def state_place(self) -> Place:
        """The rank of the state, and the number of ranks; None with a membership, whose workers change."""
        return self.averager.transport.rank, self.averager.transport.world_size

    def sum_over_places(self, x: Tensor) -> None:
        """x <- its sum over the processes of this place in all nodes, in place."""
        self.averager.transport.all_reduce(x, what="the tensors of rank 0")

    def sum_over_ranks(self, x: Tensor) -> None:
        """x <- its sum over the ranks, in place; x is equal in all processes of a node."""
        self.sum_over_places(x)
        if self.node is not None:  # whose processes sum with the processes of the same place in other nodes
            self.node.share_buffers([x])


@contextlib.contextmanager
def calling_as(name: str) -> Iterator[None]:
    """Inside, errors of collectives name this method: the usual cause is a rank without the call."""
    token = calling.set(calling.get() or name)
    try:
        yield
    finally:
        calling.reset(token)


class AveragingMixin(ABC):
    """Access to the average of all ranks' models: the methods of every wrapper.

    All public methods but `flush()`, `close()` and `comm_stats()` are collective: every rank must call them, at the
    same point of training.
    """

    module: nn.Module  # without the wrapper
    _local: AveragedModel
    _last_consensus_distance: float = float("nan")
    _has_warned_of_frozen = False
    _regions: Regions | None = None  # as declared

    @abstractmethod
    def flush(self) -> None:
        """Apply everything in flight. Local: waits for this rank's peers only. `eval()` and `state_dict()` call it."""

    def settle(self) -> None:
        """On return nothing is in flight on any rank; collective. Prepare a checkpoint of all ranks."""
        self.flush()

    @abstractmethod
    def close(self) -> None:
        """Flush, end threads, stop gossiping; idempotent. The module stays usable, and may be wrapped again."""

    @property
    def _bytes_sent(self) -> int:
        """The payload sent by this rank."""
        return self._local.averager.transport.num_bytes_sent

    @property
    def worker(self) -> str:
        """The name of this worker in statistics: its global rank; with a membership the constant number of the worker,
        and in a node ".<local rank>" after it; the name of a worker of dpwa."""
        transport = self._local.averager.transport
        return str(transport.names[transport.rank])

    def average_(self) -> None:
        """Every rank's parameters and running statistics <- their exact average over all ranks; collective.

        Other persistent buffers <- those on rank 0; see [Note: kinds of buffers] of `Selection`.

        Memory of the models from before starts anew with the next round, else it would take ranks apart again: anchors
        and outer momentum of NoLoCo and GASLoC, vectors and momentum of D2 and its like, messages of RelaySGD, public
        copies of compressed gossip. DiLoCo and its like keep all, since an average changes nothing in their next outer
        step. With `EagerDiLoCo` ranks differ until all have the part of a drift under way.
        """
        self._average()
        with calling_as("average_()"):
            self._average_kept(KeptBuffers(self.module, self._local.selection))
            self._find_differing_frozen()
        if not self._local.is_averaged:  # inside averaged() the models come back
            # If workers may fail during the average, links stay, since both ends must stay equal.
            is_elastic = self._local.averager.transport.is_elastic
            self._local.restart(Restart.AVERAGE if is_elastic else Restart.REQUEST)
            self._note_equal_models()

    def _average(self) -> None:
        """As `average_`, for a while: nothing starts anew."""
        with calling_as("average_()"):
            self.settle()
            vector = self._local.read()
            with torch.no_grad():
                self._local.averager.mix(vector, 0)
            self._local.write(vector)

    def _average_kept(self, kept: KeptBuffers) -> None:
        """The buffers that are no averages <- their values in the averaged model; after `_average`."""
        local, transport = self._local, self._local.averager.transport
        n, device = transport.world_size, local.trained[0].device
        kept.average_(local.sum_over_ranks, rank=transport.rank, world_size=n, device=device)

    def average_optimizer_state(self, optimizer: torch.optim.Optimizer, *, names: Sequence[str] | None = None) -> None:
        """The state of every rank's optimizer <- its exact average over all ranks; collective.

        Averages floating-point state of its parameter's shape, in any dtype and on any device: momentum buffers, the
        moments of Adam, copies of the parameters such as z of schedule-free optimizers or slow weights. Counters of
        steps stay. Where such state equals the parameters now (float32 masters of a bfloat16 model), the parameters
        become the average with it. Costs one copy of the averaged state. The papers of the outer optimizers keep the
        state of the inner one on each rank; averaging it too, each moment at a period of its own, is DES-LOC (Iacob et
        al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models", 2025, arXiv
        2505.22549).

        Args:
            optimizer: the optimizer of this rank. Its state is mutated, and so are parameters with a copy in the state.
                The same parameters, in the same order, on all ranks.
            names: the entries of the state to average, such as ("exp_avg",), the first moment of Adam; the others stay
                as they are. The same on all ranks. None: all.

        Raises:
            ValueError: ranks have other state than rank 0; no parameter has state of such a name and as large as
                itself; or there is no process group, as with a membership.

        Example:
            >>> if step % 30 == 0:
            ...     model.average_optimizer_state(optimizer, names=("exp_avg",))
            >>> if step % 60 == 0:
            ...     model.average_optimizer_state(optimizer, names=("exp_avg_sq",))
        """
        local, transport = self._local, getattr(self._local.averager, "transport", None)
        if not isinstance(transport, ProcessGroupTransport):
            raise ValueError(
                f"got average_optimizer_state() of a {type(self).__name__} without a process group, expected a wrapper "
                "whose ranks train in lockstep, without a membership; keep the state of each rank"
            )
        wanted, ignored = _names_of(names), local.selection.ignored_ids(self.module)
        state = list(_state_like_parameters(optimizer, names=wanted, ignored=ignored))
        with calling_as("average_optimizer_state()"), torch.no_grad():
            self.settle()  # a round in flight may have collectives of its own
            if local.copies is not None:
                local.copies.catch_up(optimizer)
            listing = [f"{k}.{name} {tuple(x.shape)} {x.dtype}" for k, name, x in state]
            given = [repr(names if wanted is None else wanted)]
            check_agreement(transport, {"optimizer state": listing, "names": given})
            _check_names(optimizer, names, wanted)  # after ranks have agreed, so that all raise
            if state:
                tensors = [local_of(x) for _, _, x in state]
                vector = FlatVector.pack(tensors, device=local.trained[0].device)
                local.averager.mix(vector, 0)
                vector.unpack_to(tensors)
                if local.copies is not None:
                    local.copies.averaged(optimizer, {name for _, name, _ in state})

    def follow(self, copies: Iterable[tuple[Tensor | Sequence[Tensor], Tensor]]) -> None:
        """Let these copies of parameters get the correction of each round, too; local.

        Masters of mixed-precision tools and state of optimizers are found without it; see the guide on optimizer state.
        Call it where a tool keeps copies elsewhere and writes them over the parameters in each step, which takes back
        the rounds. Where q is the copy and p the parameter, q <- q + (p - round(q)) after each round and before each
        step of a torch optimizer that has q. With all-reduce of gradients nothing is to be done.

        Args:
            copies: pairs of a parameter and its copy, or of several parameters and one flat copy with their elements in
                this order, from its begin; more elements after these are padding. A copy has any floating dtype and
                device, and the shape of its parameter or as many elements, contiguous. It is mutated in training. Call
                it again where a tensor was replaced, as by `optimizer.load_state_dict`: new copies take the place of
                earlier ones of the same parameter.

        Raises:
            ValueError: a pair has other tensors than a parameter of the module and as many floating-point elements, or
                a copy has other values than its parameter; or the wrapper has rounds="step", where a tool has not
                written the copies over the parameters yet.

        Example:
            >>> masters = [p.detach().float().clone() for p in model.parameters()]
            >>> model.follow(zip(model.parameters(), masters))
            >>> flat = torch.cat([p.detach().float().flatten() for p in model.parameters()])
            >>> model.follow([(list(model.parameters()), flat)])
        """
        pairs = declared_pairs(self.module, copies)
        if getattr(self, "rounds", "forward") == "step":
            raise ValueError(
                "got follow() with rounds='step', whose round runs before a tool has written the copies over the "
                "parameters; expected rounds='forward', or rounds='manual' with gossip_step() after that"
            )
        if self._local.copies is not None:
            self._local.copies.masters.declare(pairs)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Self]:
        """Inside, the model is the average over all ranks; afterwards each rank goes on from where it was.

        Collective on entry. Costs one copy of the model. Forwards inside start no rounds. Train in it and the changes
        are lost. Parameters and running statistics are averages. Other persistent buffers have the values of rank 0,
        but u and v of `spectral_norm` belong to the averaged weight; see [Note: kinds of buffers] of `Selection`.

        Example:
            >>> with model.averaged():
            ...     accuracy = evaluate(model)
        """
        with calling_as("averaged()"):
            self.settle()
            saved = self._local.read().clone()
            self._average()
            if not self._find_differing_frozen():
                self._compare_with_average(saved)
        was_averaged, self._local.is_averaged = self._local.is_averaged, True
        kept = KeptBuffers(self.module, self._local.selection)
        try:
            with calling_as("averaged()"):
                self._average_kept(kept)
            yield self
        finally:
            vector = self._local.read()
            self._local.is_averaged = was_averaged
            vector.copy_(saved)
            kept.restore()
            self._local.write(vector)

    def averaged_state_dict(self, *, rank0_only: bool = True, cpu: bool = True, full: bool = False) -> dict[str, Any]:
        """The state dict of the averaged model, under the names of the bare module: to save a trained model.

        Collective. Parameters and buffers are as in `averaged()`; frozen parameters and ignored tensors are this rank's
        own. Loads into the module without a wrapper.

        Args:
            rank0_only: whether ranks other than 0 get an empty dict and copy nothing. If the model is sharded, each
                process of the first replica gets its shard, or with `full` the first process gets the whole model.
            cpu: whether the tensors are copied to CPU memory, instead of to their own device.
            full: whether sharded parameters are gathered from their processes; False: they are DTensors.

        Returns:
            Copies; training does not change them.

        Example:
            >>> state = model.averaged_state_dict()
            >>> if rank == 0:
            ...     torch.save(state, "model.pt")
        """
        with calling_as("averaged_state_dict()"), self.averaged():
            node = self._local.node
            if rank0_only and self._local.rank != 0:
                return {}
            state = self.module.state_dict()
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value = gathered(value.detach()) if full else value.detach()
                    state[name] = value.to("cpu" if cpu else value.device, copy=True)
            return {} if rank0_only and full and node is not None and node.control.rank else state

    def _compare_with_average(self, own: FlatVector) -> None:
        """Compare the model of this rank, from before an average, with the average."""

    def _note_equal_models(self) -> None:
        """All ranks have the average as their model now."""

    def _find_differing_frozen(self) -> dict[str, Tensor]:
        """The frozen parameters that are not equal on all ranks, by name; collective. Warns of them once.

        Empty, after the warning, if ranks have frozen parameters of other names or shapes.
        """
        local, transport = self._local, self._local.averager.transport
        frozen = frozen_parameters(self.module, local.selection, local.exchanged_tensors)

        def sum_over_ranks(x: Tensor) -> None:
            on_device = x.to(local.trained[0].device)
            transport.all_reduce(on_device, what="comparing frozen parameters")
            x.copy_(on_device)

        names, are_comparable = find_differing(frozen, sum_over_ranks, world_size=transport.world_size)
        if names and not self._has_warned_of_frozen:
            self._has_warned_of_frozen = True
            shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
            warnings.warn(
                f"got frozen parameters of a {type(self).__name__} that differ between ranks: {shown}; expected equal "
                "ones, since gossip sends trained parameters alone, and an averaged model has the frozen ones of each "
                "rank. If your loop writes them (merges LoRA weights, say), call average_() before, so that all ranks "
                "write the same; if each rank is to have its own, name them in ignore=[...]",
                stacklevel=levels_to_user(),
            )
        return {name: frozen[name] for name in names} if are_comparable else {}

    def consensus_distance(self) -> float:
        """sqrt(mean_i ||z_i - mean_j x_j||^2) over the parameters, z_i = x_i / w_i; collective, costs one copy.

        Frozen parameters count too, but for ignored ones: a loop may write them. They cost nothing while they are
        equal on all ranks.
        """
        with calling_as("consensus_distance()"):
            self.settle()
            local = self._local
            vector = local.read()
            mean = vector.clone()
            local.averager.mix(mean, 0)
            local.write(vector)
            for x, y in zip(vector.parameters, mean.parameters, strict=True):
                y.sub_(x)
            if local.node is not None:
                local.node.count_once(mean)
            squared = torch.zeros(1, dtype=wide_dtype(vector.raw.device), device="cpu")
            for difference in mean.parameters:
                squared += torch.linalg.vector_norm(difference, dtype=squared.dtype).cpu() ** 2
            for name, x in self._find_differing_frozen().items():
                if x.is_floating_point() or x.is_complex():
                    own = FlatVector.pack([local_of(x)], device=vector.raw.device)
                    mean = own.clone()
                    local.averager.mix(mean, 0)
                    (y,), (z,) = mean.segments, own.segments
                    num_holders = 1 if local.node is None else local.node.num_holders(name)
                    squared += torch.linalg.vector_norm(y.sub_(z), dtype=squared.dtype).cpu() ** 2 / num_holders
            if local.node is not None and local.node.is_sharded:
                local.world.sum_over_processes(squared)
            squared, transport = squared.to(vector.raw.device), local.averager.transport
            transport.all_reduce(squared, what="the squares of all ranks")
        self._last_consensus_distance = float(squared.item() / transport.world_size) ** 0.5
        return self._last_consensus_distance

    def comm_stats(self) -> dict[str, float]:
        """Counters of the communication of this rank so far; local and cheap.

        Returns:
            bytes_sent (payload, collectives included), wait_seconds (training thread blocked), num_rounds, num_skipped
            (rounds left out for infinities or NaN), mean_staleness and max_staleness (lateness of rounds in forwards),
            consensus_distance (as last measured by `consensus_distance()`, NaN before). With overlap="auto", after the
            choice, also auto_overlap, auto_max_staleness, auto_step_seconds and auto_round_seconds; with delay="auto"
            of an outer method auto_delay (steps from the begin of an outer step to its end). With a membership also the
            entries of its `stats`.

            For each peer, by its global rank, the number of its worker with a membership, or its name with dpwa:
            bytes_sent/<peer> and bytes_received/<peer> (messages of rounds), wait_median/<peer> and wait_mad/<peer>
            (seconds of a round's wait for the peer: median and median absolute deviation of the last 64 rounds; on the
            gossip thread with overlap; with AD-PSGD and dpwa the seconds of an exchange; none on NCCL),
            staleness/<peer> (mean lateness of its messages in forwards), and num_refused/<peer> (messages that were
            left out for `max_relative_distance`; no entry before the first one). With a membership they are of the
            present generation; in a node its first process has them. An entry appears with its first round.

            After `declare_regions()`, bytes_sent_, bytes_received_ and wait_seconds_ with inside_region and
            between_regions: messages of rounds, and what this rank sends in collectives, which have no waits of single
            peers. A collective goes along a ring in the order of ranks, a broadcast down a tree.
        """
        rounds, distance = self._round_stats(), self._last_consensus_distance
        return {"bytes_sent": self._bytes_sent, **rounds, "consensus_distance": distance, **self._region_stats()}

    def declare_regions(self, regions: str | Regions) -> None:
        """Count by region.

        Local: nothing is sent. The counters have counted from the beginning, but for the first broadcast of the model.

        Args:
            regions: the global ranks of each region, such as "0-3,4-7", or `Regions`.

        Raises:
            ValueError: the regions leave out ranks of this wrapper, or its workers come and go.
        """
        if self._local.world.changes:
            raise ValueError("got regions of ranks with a membership, expected none: its workers come and go")
        found, transport = Regions.of(regions), self._local.averager.transport
        if missing := sorted({*map(int, transport.names)} - {*range(found.num_ranks)}):
            raise ValueError(f"got regions {found}, expected also the ranks {missing}; name the global ranks")
        self._regions = found

    def _region_stats(self) -> dict[str, float]:
        """The bytes and waits inside the region and between regions, if regions were declared."""
        regions = self._regions
        if regions is None:
            return {}
        transport = self._local.averager.transport
        own, names = int(transport.names[transport.rank]), transport.names
        return transport.traffic.by_region(lambda peer: regions.separate(own, int(names[peer])))

    @abstractmethod
    def _round_stats(self) -> dict[str, float]:
        """The counters of rounds: see `Engine.round_stats`."""


def _names_of(names: object) -> list[str] | None:
    """Each name once, in an equal order on all ranks; None for all, or for an argument without names."""
    if names is None or isinstance(names, str) or not isinstance(names, Iterable):
        return None
    found = list(names)
    return sorted(set(found)) if all(isinstance(name, str) for name in found) else None


def _state_like_parameters(
    optimizer: torch.optim.Optimizer, *, names: Collection[str] | None = None, ignored: Collection[int] = ()
) -> Iterator[tuple[int, str, Tensor]]:
    """Each state as large as its parameter, after the parameter's number and the name.

    Args:
        optimizer: has the state.
        names: the names of the state; None: all.
        ignored: the ids of ignored parameters.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for k, parameter in enumerate(parameters):
        for name, value in () if id(parameter) in ignored else sorted(optimizer.state.get(parameter, {}).items()):
            is_state = isinstance(value, Tensor) and value.is_floating_point() and name != "step"
            if is_state and value.shape == parameter.shape and (names is None or name in names):
                yield k, name, value


def _check_names(optimizer: torch.optim.Optimizer, names: object, wanted: Sequence[str] | None) -> None:
    """Raise ValueError for an argument without names, and for names that the optimizer's state lacks."""
    if names is not None and wanted is None:
        raise ValueError(f"got names={names!r}, expected a sequence of names, such as ('exp_avg',), or None for all")
    known = sorted({name for _, name, _ in _state_like_parameters(optimizer)})
    if missing := [name for name in wanted or () if name not in known]:
        expected = f"some of {', '.join(known)}" if known else "none yet: it has no such state before its first step"
        raise ValueError(
            f"got names={names!r} of {type(optimizer).__name__}, expected {expected}; leave out {', '.join(missing)}, "
            "which is not there, or not as large as its parameter"
        )
