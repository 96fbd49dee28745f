"""The one nn.Module base of the gossip wrappers: a round in each optimizer step, no_sync, eval flush, state."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine.background import close_in_thread
from ..engine.engine import Engine, IdleEngine
from ..flat.buffer import FlatBuffer
from ..flat.selection import Selection, mixed_buffers
from ..flat.sharded import local_of
from ..flat.transformed import call_plain, is_transformed, not_compiled, refuse_scripting
from ..flat.vector import FlatVector
from ..old_names import OldModuleNames
from ..profiling import span
from ..rounds.mixer import GlobalAverage
from ..transport.agreement import REMEDY, broadcast_tensors, find_difference
from ..transport.connect import connect, group_or_world
from ..transport.deadline import Deadline
from ..transport.process_group import ProcessGroupTransport
from ..version import __version__
from ..warn import levels_to_user
from .arguments import Links, check_flags
from .averaging import AveragingMixin
from .checkpoint import Checkpoint
from .composition import check_inside, check_optimizers, check_outside, check_sharding, claim, release
from .local_model import LocalModel
from .replica import find_difference_in_replica, make_replica
from .state import (
    KEY,
    SUFFIX,
    InnerPlace,
    Place,
    WholeState,
    check_place,
    check_prefix,
    check_whole_state,
    mark,
    plain,
    put_state,
    take_place,
    warn_stateless,
)

if TYPE_CHECKING:
    from typing_extensions import Self


_DEFAULT = Selection()
_MANY_STEPS = 10  # after which ranks should have met, and should differ
_ROUNDING = 4  # units in the last place by which an average of equal numbers may differ from them


class GossipWrapper(OldModuleNames, AveragingMixin):
    """A module that mixes its parameters with other ranks before its training forwards.

    [Note: Where a round runs] At the first training forward of an optimizer step (the wrapped module in train mode,
    grad enabled, something to train) the parameters are exactly "after optimizer.step()", so the round runs there, like
    mixing after the previous `step()`. [Note: One step is one round] of `Loop` describes the first forward of a step.
    If a GradScaler skips a step on one rank, no round is skipped. The mode of the wrapped module counts, since trainers
    put modules in train mode without the wrapper's knowledge. A forward in eval mode starts no round unless
    `gossip_in_eval_mode`; training so is an error. With `rounds="step"` the round runs after the optimizer's step, and
    with "manual" in `gossip_step()` alone.

    The constructor of a subclass connects the ranks (`_open`, or a `Participant`), and ends with `_start`.

    Args:
        module: mutated: its trained tensors become views of one flat vector, with their values.
        selection: the mixed buffers, and the local parameters and buffers.
        gossip_in_eval_mode: whether forwards in eval mode with grad enabled are training forwards too.
        rounds: when rounds run: see `RoundTime`.
        num_shards: the vector is padded to this many equal shards.

    Raises:
        ValueError: the module is wrapped or sharded by another tool, or has nothing to train.
    """

    _local: LocalModel
    _join_config: Any = SimpleNamespace(enable=False)  # of `Joinable`, where a wrapper is one

    def __init__(
        self,
        module: nn.Module,
        *,
        selection: Selection = _DEFAULT,
        gossip_in_eval_mode: bool = False,
        rounds: str = "forward",
        num_shards: int = 1,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_inside(module, wrapper=name)
        check_flags(gossip_in_eval_mode=gossip_in_eval_mode)
        self.module = module
        self.gossip_in_eval_mode = gossip_in_eval_mode
        self._sync = True  # False inside no_sync()
        self._is_checked = False  # for other tools around it
        self._has_trained = False
        self._has_warned = False  # of training after close()
        self._has_compared = False  # the models of ranks with their average
        self._averaged_at = -1  # the number of steps at the last average_()
        options: dict[str, Any] = {"selection": selection, "rounds": rounds, "num_shards": num_shards}
        self._local = LocalModel(module, name=name, run=self._round_after_step, **options)
        self._local.around = weakref.ref(self)
        module.register_load_state_dict_pre_hook(InnerPlace(self))

    def _start(self, engine: Engine, averager: GlobalAverage) -> None:
        """Be ready for the first step: the end of a constructor. No other wrapper takes the module afterwards.

        Args:
            engine: decides when rounds run.
            averager: the exact average over the same ranks.
        """
        local = self._local
        local.engine, local.averager = engine, averager
        if local.is_connected:
            local.loop.turn.limit = 2 * local.transport.timeout.total_seconds()
        local.start_training()
        local.watch_changes()
        local.world.enter()
        claim(self)

    def _open(self, links: Links, *, init_sync: bool, ranks: Sequence[int] | None = None) -> ProcessGroupTransport:
        """Connect the ranks; collective.

        With different options ranks would make different groups and hang. So they compare their options over an
        existing group first.

        Args:
            links: how the ranks reach each other.
            init_sync: whether all parameters and buffers of the module, also outside the vector, start as on rank 0;
                but for ignored ones.
            ranks: the global ranks of a new group, this one among them; None = all.

        Raises:
            ValueError: the options of ranks differ; raised on every rank, with the differing ranks and options.
            RuntimeError, TimeoutError, ConnectionError: see `connect`.
        """
        check_flags(init_sync=init_sync)
        buffer, selection = self._local.buffer, self._local.selection
        about = {"version of gossip_modules": __version__, "wrapper": type(self).__name__, "rounds": self.rounds}
        description = {**about, **self._local.description}
        is_sharded = check_sharding(self.module, links.process_group)
        others = selection.others(self.module, buffer.tensors) if init_sync else {}
        shapes = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in others.items()]
        device = buffer.vector.raw.device
        deadline = Deadline(links.timeout)  # of all waits for ranks; each part of the model has the timeout beside
        existing = connect(group_or_world(links.process_group), module_device=device, timeout=links.timeout)
        try:
            with existing.within(deadline):
                travels = {"model": buffer.signature(), "beside exchanged tensors": shapes}
                travels["push-sum weight"] = [str(buffer.vector.push_sum_weight.dtype)]
                found = find_difference(existing, {**description, **travels})
            if is_sharded:
                given: dict[str, Any] = {"device": device, "timeout": links.timeout, "found": found}
                found = find_difference_in_replica(self.module, description, **given)
            if found:
                raise ValueError(f"{found}; {REMEDY}")
            if init_sync:
                passed = deadline.passed
                broadcast_tensors(existing, [buffer.vector.raw, *map(local_of, others.values())])
                deadline.extend(deadline.passed - passed)
        finally:
            existing.close()
        transport = links.connect(device, ranks=ranks, deadline=deadline)
        self._local.connect(transport)
        if is_sharded:
            try:
                self._local.share_with(make_replica(self.module, links))
            except BaseException:
                transport.close()
                raise
        return transport

    # A forward, and the round of a step, in the order in which things happen.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, after this step's gossip round if it is a training forward; see `is_transformed`."""
        module: Any = self._modules["module"]  # self.module, without a search
        if is_transformed() or type(args) is not tuple:  # a symbol of torch.fx
            return call_plain(module, args, kwargs, wrapper=type(self).__name__)
        local = self._local
        is_training = self._before_forward()
        # The DistributedDataParallel of a node averages gradients and shares buffers, so all its processes call it:
        # in training only, and not after close().
        if local.node is not None and is_training and not local.is_closed:
            module = local.node.trained_module
        with span(f"{type(self).__name__}.forward"):
            out = module(*args, **kwargs)
        local.loop.has_ended = True
        return out

    @not_compiled
    def _before_forward(self) -> bool:
        """Return whether the forward is a training forward; see [Note: One step is one round] of `Loop`."""
        local = self._local
        with local.loop.turn:
            return self._prepare_forward(local, local.buffer)

    def _prepare_forward(self, local: LocalModel, buffer: FlatBuffer) -> bool:
        loop = local.loop
        if loop.turn.depth:  # of this thread, which has the lock
            self._refuse_if_inside_round("a forward")
        if loop.debias is not None:
            loop.debias.to_estimate()  # [Note: a step that raises] of `Debias`; else it does nothing
        is_training = torch.is_grad_enabled() and (buffer.module.training or self.gossip_in_eval_mode)
        if is_training and not self._is_checked:
            self._check_surroundings()
        # A model that is frozen for a while, like a GAN's critic, is not trained.
        is_current = is_training and buffer.is_current()
        is_training = is_training and (is_current or buffer.is_trained())
        if local.is_closed:
            if is_training and not self._has_warned:
                self._warn_alone()
        elif not is_training:
            self._evaluate()
        elif torch._C._current_graph_task_id() == -1:
            self._train(is_current=is_current)
        elif not self._has_trained:  # inside a backward: the recomputation of a checkpoint
            raise RuntimeError(
                "got a training forward inside a backward and none before it, expected rounds to run in the "
                "forward; checkpoint parts of the module, or pass use_reentrant=False"
            )
        return is_training

    def _train(self, *, is_current: bool) -> None:
        """A training forward begins."""
        if not self._has_trained:  # nn.Module takes long to set an attribute
            self._has_trained = True
        local = self._local
        if local.is_averaged:
            return
        local.is_seen_current = is_current
        if local.is_connected and local.loop.turn.trainer != (thread := threading.get_ident()):
            local.transport.thread = thread
        try:
            for _ in range(local.loop.num_rounds_due(is_synced=self._sync)):
                self._begin_step()
        finally:
            local.is_seen_current = False
        if not (is_current or local.buffer.is_attached()):  # without a round now, as with rounds="step"
            local.reattach()  # the next step is one of the tensors that the module has now

    def _begin_step(self) -> None:
        """Run the round at the begin of an optimizer step."""
        local = self._local
        if local.buffer.is_capturable and local.buffer.is_captured():
            raise RuntimeError(
                f"got a round of a {type(self).__name__} in the capture of a CUDA graph, whose replays would run none; "
                "expected model.module in the graph, and rounds='manual' with gossip_step() after each replay"
            )
        if self._join_config.enable:
            self._notify()
        if not local.is_held:
            local.step()
        local.loop.begin()

    def _refuse_if_inside_round(self, what: str) -> None:
        if self._local.loop.turn.is_in_change:
            raise RuntimeError(
                f"got {what} of a {type(self).__name__} inside a gossip round, as in the handler of a signal, expected "
                "it between steps: the round writes the parameters; set a flag in the handler, and act on it after the "
                "step"
            )

    def _notify(self) -> None:
        """Announce another batch of this rank to the other ranks; for `Join`."""

    @not_compiled
    def gossip_step(self) -> None:
        """Run the round of an optimizer step now.

        With `rounds="manual"` only this runs rounds: call it once per optimizer step, on all ranks alike, where no
        backward is under way (after `optimizer.step()`, or before the forward). Use it in loops without a forward of
        the wrapper at the beginning of a step: pipeline schedules, several models, losses computed by the inner module.
        With the other settings of `rounds` it runs the round of the present step early; the next forward or optimizer
        step then starts none for that step. Call it on a rank in place of a batch if only this rank leaves the batch
        out.

        Raises:
            RuntimeError: inside a backward or `averaged()`, or after `close()`.
            TimeoutError, ConnectionError, FloatingPointError: see the forward.

        Example:
            >>> model = GossipDataParallel(model, rounds="manual")
            >>> loss = model.module.loss(x, y)
            >>> loss.backward()
            >>> optimizer.step()
            >>> model.gossip_step()
        """
        name = type(self).__name__
        if self._local.is_closed:
            raise RuntimeError(
                f"got gossip_step() after close() of a {name}, expected it before; wrap the module again"
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"got gossip_step() of a {name} inside a backward, which reads the parameters that a round writes; "
                "expected it after the backward, or before the forward"
            )
        if self._local.is_averaged:
            raise RuntimeError(
                f"got gossip_step() of a {name} inside averaged(), after which each rank goes on from its own model; "
                "expected it outside"
            )
        self._refuse_if_inside_round("a step")
        self._local.to_estimate()
        self._check_surroundings()
        self._has_trained = True
        self._begin_step()

    def _round_after_step(self) -> None:
        """The round of `rounds="step"`, in a hook on the optimizer's step."""
        if not self._local.is_closed:
            self._refuse_if_inside_round("a step")
            self._begin_step()

    def _check_surroundings(self) -> None:
        """Refuse other tools around the wrapper, once, when training begins."""
        if not self._is_checked:
            check_outside(self, was_sharded=self._local.buffer.is_sharded)
            node = self._local.node
            check_optimizers(self, self._local.trained[0], equal_ranks=() if node is None else node.equal_ranks)
            for part in mixed_buffers(self.module):
                part.check_training()
            self._is_checked = True

    # Forwards and changes outside of steady training.

    def _evaluate(self) -> None:
        """A forward outside of training, perhaps in an eval mode unknown to the wrapper."""
        if self._local.loop.turn.is_of_other_thread:
            return
        if self.module.training:
            if not torch.is_grad_enabled():
                self._local.loop.note_plain_forward()
            return
        if self._sync:
            self._local.loop.end()  # as after eval()
        if torch.is_grad_enabled():
            self._local.loop.evaluate()

    def _warn_alone(self) -> None:
        """Say that a training forward after close() is of this rank alone; once."""
        self._has_warned = True
        name = type(self).__name__
        if isinstance(self._local.engine, IdleEngine):
            what = f"in a copy of a {name}, which gossips with nobody: it trains alone; wrap its module to gossip"
        else:
            what = (
                f"after close() of a {name}, which gossips no more: this rank trains alone from now on; close() after "
                "the last step, or wrap the module again to gossip"
            )
        warnings.warn(
            f"got a training forward {what}; to evaluate call eval() or use torch.no_grad()",
            stacklevel=levels_to_user(),
        )

    # The methods of a wrapper around a training loop.

    @property
    def rounds(self) -> str:
        """When rounds run: "forward", "step" or "manual"."""
        return self._local.loop.when.value

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a forward is outside `no_sync()`; may be set instead, as for DistributedDataParallel.

        Example:
            >>> for k, (x, y) in enumerate(micro_batches):
            ...     model.require_backward_grad_sync = k == len(micro_batches) - 1
            ...     criterion(model(x), y).backward()
        """
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        check_flags(require_backward_grad_sync=value)
        self._sync = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside belong to the same optimizer step as the first forward outside: one round for all.

        Gradient accumulation as with DistributedDataParallel: run all micro-batches but the last in it. `eval()` ends a
        step, so ranks stay in step even if an epoch breaks off inside. The processes of a node average gradients when
        it ends.
        """
        (before, self._sync), node = (self._sync, False), self._local.node
        try:
            with contextlib.nullcontext() if node is None else node.no_sync():
                yield
        finally:
            self._sync = before

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`, after a flush; eval mode also ends the current step.

        If the parameters hold other weights, such as an average for evaluation, corrections stay in flight: see [Note:
        Swapped weights] of `TrainedWeights`.
        """
        self.before_mode(mode)
        return super().train(mode)

    def before_mode(self, mode: bool) -> None:
        """The module is about to be in train or eval mode."""
        local = self._local
        with local.loop.turn:
            if not local.may_flush:
                return
            local.to_estimate()  # [Note: a step that raises] of `Debias`
            if not local.holds_other_weights():
                self.flush()
            if not mode:
                local.loop.end()

    def flush(self) -> None:
        """See `AveragingMixin`. Leaves the de-biased estimate in the parameters.

        While a step of training is under way, corrections stay in flight in a signal handler and in each thread beside
        the training thread: see [Note: One thread at a time] of `Turn`.
        """
        local = self._local
        with local.loop.turn:
            if local.may_flush:
                local.flush()

    def close(self) -> None:
        """See `AveragingMixin`. Forwards after it are local; a training forward warns, once."""
        local = self._local
        if local.is_closed:
            return
        local.to_estimate()
        local.loop.end_training()
        try:
            if local.engine.is_asynchronous:
                local.engine.close()  # before the flush, which applies what peers say meanwhile
            self.flush()
        finally:
            local.stop()
            release(self)
            local.engine.close()
            if (at_end := _at_end.pop(self, None)) is not None:
                at_end.detach()
            self._release()
        if not local.engine.is_asynchronous:
            self._warn_of_no_round()

    def _compare_with_average(self, own: FlatVector) -> None:
        """Warn, once, if ranks have equal models after steps: they read the same data."""
        local = self._local
        is_early = local.num_steps < _MANY_STEPS or not local.loop.has_stepped or local.num_steps == self._averaged_at
        if self._has_compared or is_early or local.averager.transport.world_size == 1:
            return
        self._has_compared, average = True, local.buffer.vector
        pairs = [(x, y) for x, y in zip(own.parameters, average.parameters, strict=True) if x.numel()]
        if pairs and all(map(_are_equal, *zip(*pairs, strict=True))):
            warnings.warn(
                f"got equal models on all ranks of a {type(self).__name__} after {local.num_steps} optimizer steps: "
                "ranks have read the same data, or the learning rate is zero; expected other batches on each rank, as "
                "with torch.utils.data.DistributedSampler(dataset)",
                stacklevel=levels_to_user(),
            )

    def _note_equal_models(self) -> None:
        """See `AveragingMixin`: ranks that have taken no step since then are equal, whatever they read."""
        self._averaged_at = self._local.num_steps

    def _warn_of_no_round(self) -> None:
        local, stats = self._local, self._local.engine.stats
        has_peers = local.transport.world_size > 1 and local.node is None
        if has_peers and local.num_steps >= _MANY_STEPS and not stats.num_rounds:
            warnings.warn(
                f"closed a {type(self).__name__} after {local.num_steps} steps without a round: ranks have trained "
                "alone; expected a period that is shorter than the run, such as a smaller sync_every=",
                stacklevel=levels_to_user(),
            )

    def _release(self) -> None:
        """Give back groups, threads and connections, when nothing uses them any more."""
        local = self._local
        local.world.close()
        local.transport.close()
        if local.node is not None:
            local.node.close()

    @property
    def worker(self) -> str:
        """See `AveragingMixin`."""
        return self._local.world.own_name or super().worker

    @property
    def _bytes_sent(self) -> int:
        local = self._local
        local_bytes = 0 if local.node is None else local.node.num_bytes_sent
        return int(local.transport.num_bytes_sent) + local.world.num_bytes_sent + local_bytes

    def comm_stats(self) -> dict[str, float]:
        """See `AveragingMixin`."""
        local, peers = self._local, {}
        if local.is_connected:
            peers = local.transport.traffic.summary(local.transport.names)
        return {**super().comm_stats(), **local.world.stats(), **peers}

    def extra_repr(self) -> str:
        """The rank and the options, one per line."""
        local = self._local
        place = () if local.place is None else (f"rank {local.place[0]} of {local.place[1]}",)
        return "\n".join([*place, *(f"{name}={value}" for name, value in local.description.items())])

    # State: [Note: Where the state is] of `state.py`.

    @property
    def own_place(self) -> Place:
        """The rank and the world size of its state; None with a membership, whose workers change."""
        return None if self._local.world.changes else self._local.place

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`, de-biased; gossip state, with the rounds in flight, is in its metadata.

        Among several ranks the key "_extra_state" holds the rank: int64 [2]. In a thread beside the training thread,
        and in a signal handler inside a step, it has copies, without the round in flight. In a signal handler inside a
        round it has no state of gossip that can be loaded, and warns.
        """
        save = super().state_dict
        return self.saved_by(lambda: save(*args, **kwargs), self._prefix_in(args, kwargs), inside="module.")

    @staticmethod
    def _prefix_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        return str(args[1] if len(args) > 1 else kwargs.get("prefix", ""))

    def saved_by(self, save: Callable[[], Any], prefix: str, *, inside: str, has_place: bool = True) -> Any:
        """The state dict of `save`, at a moment at which the weights are whole, or in copies.

        Args:
            save: `state_dict` of `nn.Module`.
            prefix: see `mark`.
            inside: see `mark`.
            has_place: whether the state dict has the place of this rank.
        """
        local = self._local
        with local.loop.turn:
            is_flushed = local.may_flush
            if is_flushed:
                local.wait_for_rounds()
            elif not local.is_whole:
                warnings.warn(
                    f"got state_dict() of a {type(self).__name__} inside a gossip round or an optimizer step, as in "
                    "the handler of a signal: its tensors may be of two moments, and load_state_dict() of a wrapper "
                    "refuses it; set a flag in the handler, and save after the step",
                    stacklevel=levels_to_user(),
                )
            state = save()
            if not is_flushed or local.loop.turn.is_of_other_thread:
                local.own_copies(state)
            if has_place:
                mark(state, prefix, inside=inside)
            return state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # a plain dict of the caller has none: there the key stays
            put_state(destination, prefix, plain(destination.pop(prefix + SUFFIX)), self.own_place)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        check_prefix(state_dict, prefix, self.module, wrapper=type(self).__name__)
        self.before_load()
        take_place(state_dict, prefix, local_metadata, self.own_place, inside="module.")
        if state_dict.setdefault(prefix + SUFFIX, local_metadata.get(KEY)) is None and KEY not in local_metadata:
            warn_stateless()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def before_load(self) -> None:
        """The parameters are about to become others for good."""
        self._local.wait_for_rounds()
        self._local.loop.trained_weights.forget()
        self._local.loop.forget_evaluation()

    def get_extra_state(self) -> dict[str, Any]:
        """The round counter, the algorithm's own state, and the rank: plain values and tensors.

        "engine", the algorithm's own state, is read like a dict; tools with a value per key keep it as one.
        """
        if not (self._local.is_whole or self._local.may_flush):
            return {"is_interrupted": True}
        state = self._local.state_dict()
        return {**state, "engine": WholeState(state["engine"])}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Take back what `get_extra_state` gave; None restarts it, as after loading other weights into the module.

        Raises:
            ValueError: it is the state of another rank, or of a world of another size, or was saved inside a round;
                nothing is changed then.
        """
        if state is not None:
            check_place(state, self.own_place)
            check_whole_state(state, wrapper=type(self).__name__)
            state = {**state, "engine": plain(state["engine"])}
        self._local.load_state_dict(state or {})

    def checkpoint(self, *optimizers: Optimizer) -> Checkpoint:
        """Return the state of all ranks as a `Stateful`, for torch.distributed.checkpoint.

        Each rank has keys of its own, so it gets its own model, memory and optimizers back. The average of all ranks is
        under the names of the module. Another number of ranks begins with the average: pass
        `planner=DefaultLoadPlanner(allow_partial_load=True)` to load. See `Checkpoint` for the keys and errors. Save
        and load on all ranks, with the default process group of this rank's job.

        Args:
            optimizers: the optimizers of this rank, over the parameters of this model; loaded after the model.

        Example:
            >>> dcp.save({"model": model.checkpoint(optimizer)}, checkpoint_id=folder)
            >>> dcp.load({"model": model.checkpoint(optimizer)}, checkpoint_id=folder)
        """
        return self.checkpoint_of(self, optimizers)

    def checkpoint_of(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Checkpoint:
        """Return the checkpoint of `checkpoint` for a model.

        Args:
            model: this wrapper, or its module of `gossip()`.
            optimizers: see `checkpoint`.
        """
        algorithm = self._local.description.get("algorithm", type(self).__name__)
        lost = f"the counters of rounds, push-sum weights and the memory of {algorithm}"
        start_over = partial(self.set_extra_state, None)
        return Checkpoint(model, self, self._local, optimizers, start_over=start_over, lost=lost)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """`.to()`, `.half()` and their like: corrections in flight belong to the old dtype and device."""
        self.flush()
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return self.__dict__.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As the module's own would be, without `__reduce_ex__`."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError, where ranks are connected."""
        if self._local.place is None:
            return super().__reduce_ex__(protocol)
        raise TypeError(
            f"got a {type(self).__name__} to pickle, which torch.save does too, expected its state, since connections "
            "to other ranks are in no file; save state_dict() to train on, or averaged_state_dict() to use the model; "
            "copy.deepcopy makes copies"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._local.bind(self, self._round_after_step)
        if not self._local.is_closed:
            claim(self, is_copy=True)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_scripting(type(self).__name__, "use torch.jit.script(model.module)")

    def _round_stats(self) -> dict[str, float]:
        return self._local.engine.round_stats()


def _are_equal(x: Tensor, average: Tensor) -> bool:
    """Whether x and the average of ranks are equal up to rounding; the average is in float32 if x is narrower."""
    eps = min(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)
    return torch.allclose(x, average, rtol=_ROUNDING * eps, atol=0.0)


def close_when_collected(wrapper: object, engine: Engine) -> None:
    """Close `engine` when `wrapper` is collected, if nobody has closed it by then.

    [Note: Lost wrappers] The threads of an asynchronous engine outlive an unclosed wrapper, and would go on giving its
    model to peers. A closed wrapper needs this no more, and it would keep the engine: after an error the engine has the
    traceback, whose frames hold the wrapper, so neither would ever be collected.
    """
    _at_end[wrapper] = weakref.finalize(wrapper, _close_lost, engine, type(wrapper).__name__)
    _at_end[wrapper].atexit = False  # the threads just end


_at_end: weakref.WeakKeyDictionary[object, weakref.finalize[..., Any]] = weakref.WeakKeyDictionary()


def _close_lost(engine: Engine, name: str) -> None:
    """Runs in the thread of the garbage collection. This thread must not wait for peers, so a thread of its own closes
    the engine."""
    if engine.is_closed:
        return
    has_peers = engine.has_peers
    close_in_thread(engine)
    if has_peers:
        warnings.warn(
            f"a {name} was lost without close(): it leaves its peers now; call close() after the last step",
            ResourceWarning,
            stacklevel=2,
        )
