"""Checkpoint: the models of all ranks, and their average, for torch.distributed.checkpoint and other tools."""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..flat.kept_buffers import take_from_first
from ..flat.sharded import is_cut, is_sharded, local_of, with_shards
from ..flat.vector import FlatVector
from ..transport.state_tree import copied
from .averaging import AveragedModel, AveragingMixin, calling_as
from .state import KEY, Place, WholeState, drop_state, fingerprint, plain

_log = logging.getLogger("gossip_modules.checkpoint")
_OWN = "memory (of other ranks or shards: pass planner=DefaultLoadPlanner(allow_partial_load=True))"


class Checkpoint:
    """The state of all ranks: a `Stateful` of torch.distributed.checkpoint, made by `model.checkpoint(...)`.

    [Note: Keys of a checkpoint] `torch.distributed.checkpoint` keeps one value per key, of any rank. So each rank has
    keys of its own:

        <name of a tensor in the module>    the average, equal on all ranks: a plain module loads it
        gossip.world                        the number of ranks, and a fingerprint of the average
        gossip.optimizers                   the averages of the optimizers
        gossip.rank_i_of_n.memory (...)     the state of gossip on rank i, and a fingerprint of its model
        gossip.rank_i_of_n.model.<name>     its model
        gossip.rank_i_of_n.optimizers       its optimizers

    `torch.distributed.checkpoint.load` asks for the keys of the loading run, and refuses a file without one of them.
    For a file of another number of ranks, tell it to leave out the keys of a rank: the name of the first of them says
    how, since torch puts that name into its error. The fingerprints show which tensors came from the file.

    If a replica is sharded over processes, i is the number of the replica. Tensors of models are DTensors, so torch
    loads them with another sharding too. The state of one process has the name of its shard besides:
    `gossip.rank_i_of_n_shard_j_of_m`, `gossip.optimizers_shard_j_of_m`. Another sharding begins with the average.

    With a membership no state belongs to a rank, so one worker writes for all: `gossip.worker` takes the place of
    `gossip.rank_i_of_n`, its model is the average, and the optimizers are its own.

    Args:
        model: the wrapper, or the module of `gossip()`.
        wrapper: the wrapper.
        local: its model.
        optimizers: the optimizers of this rank, over the parameters of the model.
        start_over: lets the wrapper keep nothing of the models from before.
        lost: the names of the state to restart with another number of ranks, for the warning.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapper: AveragingMixin,
        local: AveragedModel,
        optimizers: Sequence[Optimizer],
        *,
        start_over: Callable[[], None] = lambda: None,
        lost: str = "",
    ) -> None:
        for optimizer in optimizers:
            if not callable(getattr(optimizer, "load_state_dict", None)):
                raise ValueError(
                    f"got {type(optimizer).__name__} in checkpoint(), expected optimizers: checkpoint(optimizer); "
                    "save what is equal on all ranks, such as a scheduler, beside the checkpoint"
                )
        self._model, self._wrapper, self._optimizers, self._lost = model, wrapper, optimizers, lost
        self._local, self._start_over = local, start_over
        self._prefix = "" if wrapper.module is model else "module."

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return copies on the CPU, independent of training; collective. Nothing is in flight then.

        See [Note: Keys of a checkpoint]. `torch.save` may save the result of one rank, for another number of ranks.

        Raises:
            TimeoutError, ConnectionError: a rank did not call it, or is gone; names it.
        """
        average, optimizers = self._common_state([each.state_dict() for each in self._optimizers])
        place, own = self._local.state_place, self._own_state()
        model = {name: copied(own[self._prefix + name], saved) for name in average} if place is not None else {}
        if (node := self._local.node) is not None and self._shard is not None:  # the processes that hold one replica
            node.share_buffers([x for x in model.values() if isinstance(x, Tensor) and not is_cut(x)])
        gossip = copied(getattr(own, "_metadata", {}).get("", {}).get(KEY), saved)
        world: dict[str, Any] = {"num_ranks": 0 if place is None else place[1], "shards": self._shards}
        world |= {"fingerprint": fingerprint(average), "shapes": fingerprint(average, has_numbers=False)}
        entry: dict[str, Any] = {_OWN: WholeState({"fingerprint": fingerprint(model), "gossip": gossip})}
        shared: dict[str, Any] = {"world": WholeState(world), self._name(_name_of(place)): entry}
        if self._optimizers:
            shared[self._name("optimizers")] = WholeState({"states": copied(optimizers, _saved_state)})
        if place is not None:
            shared.setdefault(_name_of(place), {})["model"] = model
            if self._optimizers:
                states = copied([each.state_dict() for each in self._optimizers], _saved_state)
                entry["optimizers"] = WholeState({"states": states})
        return {**average, "gossip": shared}

    @property
    def _shard(self) -> tuple[int, int] | None:
        """The number of the shards that this process holds, and the number of processes of a replica; None: all."""
        node = self._local.node
        return None if node is None or not node.is_sharded else (node.local_rank, node.control.world_size)

    @property
    def _shards(self) -> int:
        return 1 if self._shard is None else self._shard[1]

    def _name(self, name: str) -> str:
        """Return the name of the state of one process, if other processes hold other shards of the replica."""
        shard = self._shard
        return name if shard is None else f"{name}_shard_{shard[0]}_of_{shard[1]}"

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the entry of this rank, or the average if another number of ranks has saved it; call it on all ranks.

        With the average all state of gossip restarts, with a warning in the log: the logger
        "gossip_modules.checkpoint".

        Args:
            state_dict: a state of `state_dict()`.

        Raises:
            ValueError: the file is not of such a checkpoint, is of another model, or lacks the optimizers. Nothing is
                changed then.
        """
        state_dict = dict(state_dict)
        gossip = state_dict.pop("gossip", None)
        world = gossip.get("world") if isinstance(gossip, Mapping) else None
        if world is None:
            raise ValueError(
                f"got a state dict with {_some(state_dict)} without 'gossip.world', expected one of checkpoint(); load "
                "the model alone before you wrap it: module.load_state_dict(...)"
            )
        place = self._local.state_place
        name = _name_of(place)
        entry = {**gossip.get(name, {}), **gossip.get(self._name(name), {})}
        is_own = _is_there(entry.get(_OWN), world)
        self._check(state_dict, world, "the average")
        if is_own and place is not None:
            self._check(entry["model"], entry[_OWN], "this rank")
        found = entry.get("optimizers") if is_own and place is not None else gossip.get(self._name("optimizers"))
        optimizers = self._states_of(found, world)
        if is_own:
            self._load(state_dict if place is None else entry["model"], entry[_OWN]["gossip"])
        else:
            self._warn(world, place, has_optimizers=optimizers is not None)
            self._load(state_dict, None)
            self._start_over()  # from the tensors that are there now
        for optimizer, state in zip(self._optimizers, optimizers or (), strict=optimizers is not None):
            optimizer.load_state_dict(with_shards(state, optimizer))

    @torch.no_grad()
    def _common_state(self, optimizers: Any) -> tuple[dict[str, Any], Any]:
        """`averaged_state_dict` and the average of states of optimizers, both equal on all ranks; collective.

        Tensors without an average, such as ignored ones, come from rank 0. The optimizers are None if the states of
        ranks have other names or shapes, and this rank's own with a membership.
        """
        state = self._wrapper.averaged_state_dict(rank0_only=False, cpu=self._shard is None)
        drop_state(state)
        with calling_as("checkpoint()"):
            local, module = self._local, self._wrapper.module
            device, rank = local.trained[0].device, local.averager.transport.rank
            averaged = {id(x) for x in (*local.trained, *local.selection.averaged(module).values())}
            averaged |= {id(x) for x in local.selection.copied(module).values()}
            named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            names = {name for name, x in named if id(x) in averaged}
            left = [x for name, x in state.items() if name not in names and isinstance(x, Tensor)]
            sums: list[tuple[bool, Any]] = [(False, local.sum_over_ranks), (True, local.sum_over_places)]
            for is_shard, sum_over in sums:
                if others := [local_of(x) for x in left if is_cut(x) == is_shard]:
                    take_from_first(others, sum_over, rank=rank, device=device)
            return state, optimizers if local.state_place is None else self._average_states(copied(optimizers), device)

    def _average_states(self, states: Any, device: torch.device) -> Any:
        """The states of optimizers with the averages of their tensors, in place; None: see `_common_state`."""
        of_all = [_floats(of) for state in states for of in state["state"].values()]
        tensors = [local_of(x) for of in of_all for name, x in of if name != "step"]
        listing = [f"{list(of)}" for state in states for of in state["state"].values()]
        listing += [f"{tuple(x.shape)} {x.dtype}" for x in tensors]
        if len(set(self._digests_of("\n".join(listing), device))) > 1:
            return None
        if tensors:
            vector = FlatVector.pack(tensors, device=device)
            self._local.averager.mix(vector, 0)
            vector.unpack_to(tensors)
        return states

    def _digests_of(self, text: str, device: torch.device) -> list[int]:
        """A digest of the text of each rank; collective."""
        transport = self._local.averager.transport
        digests = torch.zeros(transport.world_size, dtype=torch.int64, device=device)
        digests[transport.rank] = zlib.crc32(text.encode())
        self._local.sum_over_ranks(digests)
        found: list[int] = digests.tolist()
        return found

    def _own_state(self) -> Any:
        return self._model.state_dict()

    def _load(self, tensors: Mapping[str, Any], gossip: Any) -> None:
        """Load tensors by bare names, and the state of gossip; None: it begins anew."""
        whole: Any = OrderedDict((self._prefix + name, value) for name, value in tensors.items())
        whole._metadata = self._own_state()._metadata
        if KEY in whole._metadata[""]:
            whole._metadata[""][KEY] = None if gossip is None else plain(gossip)
        self._model.load_state_dict(whole)

    def _check(self, tensors: Mapping[str, Any], of: Any, whose: str) -> None:
        """Raise ValueError if these are not the tensors that were saved; with another sharding, not of their shapes."""
        is_same = of.get("shards", self._shards) == self._shards
        if of["fingerprint" if is_same else "shapes"] != fingerprint(tensors, has_numbers=is_same):
            raise ValueError(
                f"got a checkpoint whose model of {whose} has other tensors than were saved, or not all of this model, "
                f"expected {_some(tensors)}; load a checkpoint of the same model, saved by checkpoint()"
            )

    def _states_of(self, found: Any, world: Any) -> list[Any] | None:
        """The states of the optimizers; None: ranks had none in common, or other shards."""
        if not self._optimizers:
            return []
        if not _is_there(found, world):
            if world["shards"] != self._shards:
                return None
            raise ValueError(
                f"got a checkpoint without optimizers, expected {len(self._optimizers)}; save it with "
                "checkpoint(optimizer), or load it with checkpoint() and begin with a new optimizer"
            )
        states = found["states"]
        if states is not None and len(states) != len(self._optimizers):
            raise ValueError(
                f"got a checkpoint with {len(states)} optimizers, expected {len(self._optimizers)}; give checkpoint() "
                "the optimizers of the saved run, in the same order"
            )
        return None if states is None else list(states)

    def _warn(self, world: Any, place: Place, *, has_optimizers: bool) -> None:
        lost = [self._lost] if self._lost else []
        lost += [] if has_optimizers else ["the optimizers, whose state differed between ranks or shards"]
        _log.warning(
            "got a checkpoint of %s for %s: begins with the average of the models%s; lost: the difference of each rank "
            "from it%s",
            _described(world["num_ranks"], world["shards"]),
            _described(0 if place is None else place[1], self._shards),
            " and optimizers" if self._optimizers and has_optimizers else "",
            "".join(f", {text}" for text in lost),
        )


def _floats(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in the state of one parameter, by name."""
    return ((name, x) for name, x in state.items() if isinstance(x, Tensor) and x.is_floating_point())


def _described(num_ranks: int, num_shards: int) -> str:
    ranks = f"{num_ranks} {'ranks' if num_shards == 1 else 'replicas'}" if num_ranks else "a membership"
    return ranks if num_shards == 1 else f"{ranks} in {num_shards} shards"


def _name_of(place: Place) -> str:
    return "worker" if place is None else f"rank_{place[0]}_of_{place[1]}"


def _saved_state(x: Tensor) -> Tensor:
    """A copy of a tensor in the state of an optimizer: the elements in this process, as a `WholeState` is of one."""
    return saved(local_of(x))


def _is_there(value: Any, world: Any) -> bool:
    """Whether a value of a checkpoint comes from the place that `world` comes from: a file, or memory.

    torch.distributed.checkpoint leaves the value of this run, or None, where the file lacks a key. In a file a
    `WholeState` is a plain dict.
    """
    return value is not None and isinstance(value, WholeState) == isinstance(world, WholeState)


def _some(tensors: Mapping[str, Any]) -> str:
    names = list(tensors)
    return f"{', '.join(map(repr, names[:3]))}{' ...' if len(names) > 3 else ''}" if names else "no tensors"


def saved(x: Tensor) -> Tensor:
    """A copy of a tensor as a checkpoint keeps it, on the CPU.

    [Note: Tensors in a checkpoint] All tensors of a checkpoint come from here. A DTensor stays a DTensor on its device,
    so that torch.distributed.checkpoint can load it with another sharding.
    """
    return x.detach().clone() if is_sharded(x) else x.detach().to("cpu", copy=True)
