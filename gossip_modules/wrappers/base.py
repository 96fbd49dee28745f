"""The one nn.Module base of the gossip wrappers: a round in each optimizer step, no_sync, eval flush, state."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torch import Tensor, nn

from ..engine.background import close_in_thread
from ..engine.engine import Engine, IdleEngine
from ..flat.buffer import FlatBuffer
from ..flat.selection import Selection
from ..flat.transformed import refuse_scripting
from ..flat.vector import FlatVector
from ..transport.process_group import ProcessGroupTransport
from .arguments import check_flags
from .averaging import FlatAveraging
from .composition import check_inside, hold, let_go
from .foreign.attributes import ForeignAttributes
from .foreign.ddp import DDP_ATTRIBUTES
from .old_names.attributes import MISSING, OldMethods
from .optimizer_steps import OptimizerSteps, RoundTime
from .setup import Links, open_transport
from .state import InnerPlace, RoundState, check_prefix
from .step import TrainingStep
from .travelling import Travelling
from .unsynced_steps import UnsyncedSteps
from .weights.copies import WeightCopies
from .weights.own import OwnWeights

if TYPE_CHECKING:
    from typing_extensions import Self


_DEFAULT = Selection()


class GossipWrapper(ForeignAttributes, OldMethods, TrainingStep, RoundState, FlatAveraging):
    """A module whose parameters are mixed with those of other ranks before its training forwards.

    [Note: Where a round runs] At the first training forward of an optimizer step (the wrapped module in train mode,
    grad enabled, something to train) the parameters are exactly "after optimizer.step()", so the round runs there, like
    mixing after the previous `step()`. [Note: One step is one round] says which forward begins a step; a GradScaler
    that skips a step on one rank skips no round. The mode is that of the wrapped module, since trainers put modules in
    train mode without the wrapper's knowledge. A forward in eval mode starts no round unless `gossip_in_eval_mode`;
    training so is an error. With `rounds="step"` the round runs after the optimizer's step, and with "manual" in
    `gossip_step()` alone.

    [Note: What travels] is what is trained at a training forward, and what was trained since the last round. The first
    forward after `requires_grad_()`, or after layers have come or gone, makes a new vector on all ranks alike, once
    they have compared what they train; see `Travelling`. Nothing else does: a `flush()`, which one rank may call alone
    (for `eval()`, or to save), leaves vectors as they are, so that those of all ranks still match. An asynchronous
    wrapper, whose peers may ask for its model at any time, goes on with what is frozen and refuses what is new. Tensors
    that `functional_call` lends to the module for one forward are not its own: such a forward starts no round.

    [Note: Safe point] Gossip writes parameters in place, through storage that autograd does not watch. So it bumps
    their version: a backward through a graph that was built before the round fails with autograd's own "modified by
    an inplace operation" instead of computing wrong gradients.

    A subclass makes `_engine`, which says when rounds run, and `_averager`, and ends its constructor with
    `hold(self)`, after which no other wrapper takes the module. What a training forward does is in `TrainingStep`.

    Args:
        module: mutated: its trained tensors become views of one flat vector, which keeps their values.
        selection: the buffers that are mixed too, and the parameters and buffers that stay local.
        gossip_in_eval_mode: whether forwards in eval mode with grad enabled are training forwards too.
        rounds: when rounds run: see `RoundTime`.
        num_shards: the vector is padded to this many equal shards.

    Raises:
        ValueError: the module is wrapped or sharded by another tool, or has nothing to train.
    """

    _foreign_attributes: ClassVar[Mapping[str, str]] = {**DDP_ATTRIBUTES, **MISSING}

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
        check_inside(module, wrapper=type(self).__name__)
        check_flags(gossip_in_eval_mode=gossip_in_eval_mode)
        self.module = module
        self.gossip_in_eval_mode = gossip_in_eval_mode
        self._unsynced_steps = UnsyncedSteps()
        self._travelling = Travelling()
        self._sync = True
        self._is_closed = False
        self._is_checked = False  # what is around it
        self._has_trained = False
        self._trains = False  # in this forward
        self._place: tuple[int, int] | None = None  # rank and world size, where there are such
        self._description: dict[str, str] = {}  # what ranks agree on, by name
        when = RoundTime.of(rounds)
        self._buffer = FlatBuffer(module, selection=selection, num_shards=num_shards)
        self._own_weights = OwnWeights(self._buffer, self._add_again)
        self._copies: WeightCopies = WeightCopies(self._buffer, name=type(self).__name__)
        self._steps = OptimizerSteps(self._buffer, when, name=type(self).__name__, run=self._round_after_step)
        module.register_load_state_dict_pre_hook(InnerPlace(self))

    def _open(self, links: Links, *, init_sync: bool, **options: Any) -> ProcessGroupTransport:
        """See `open_transport`; the ranks agree on the class and on `_description`."""
        check_flags(init_sync=init_sync)
        whole = {"wrapper": type(self).__name__, "rounds": self.rounds, **self._description}
        return open_transport(self._buffer, whole, links, init_sync=init_sync, **options)

    @property
    def rounds(self) -> str:
        """When rounds run: "forward", "step" or "manual"."""
        return self._steps.rounds.value

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

        Gradient accumulation as with DistributedDataParallel: all micro-batches but the last go in here. `eval()` ends
        a step, so an epoch that breaks off inside leaves no rank out of step with the others.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def train(self, mode: bool = True) -> GossipWrapper:
        """As `nn.Module.train`, after a flush; eval mode also ends the current step.

        Where other weights stand in the parameters, as an average that is evaluated, corrections stay in flight: see
        [Note: Swapped weights].
        """
        self._flush_own()
        if not mode:
            self._steps.end()
        return super().train(mode)

    def flush(self) -> None:
        """See `AveragingMixin`. Leaves the de-biased estimate in the parameters."""
        if self._is_closed:
            return
        if not self._buffer.is_attached():
            self._reattach()
        self._apply_in_flight()

    def _flush_own(self) -> None:
        """As `flush()`, if the parameters are those of training: [Note: Swapped weights]."""
        self._to_estimate()  # [Note: a step that raises]
        if not self._own_weights.is_replaced():
            self.flush()

    def close(self) -> None:
        """See `AveragingMixin`. Forwards after it are local; a training forward warns, once."""
        if not self._is_closed:
            try:
                if self._engine.is_asynchronous:
                    self._engine.close()  # before the flush, which applies what peers say meanwhile
                self.flush()
            finally:
                self._is_closed = True
                self._own_weights.close()
                self._copies.close()
                self._steps.close()
                let_go(self)
                self._engine.close()
                self._release()

    def _release(self) -> None:
        """Give back groups, threads and connections, when nothing uses them any more."""
        if self._elastic is not None:
            self._elastic.membership.close()

    def comm_stats(self) -> dict[str, float]:
        """See `FlatAveraging`; with a membership also what its `stats` and `wait_stats` give."""
        if self._elastic is None:
            return super().comm_stats()
        membership = self._elastic.membership
        return {**super().comm_stats(), **membership.stats(), **membership.wait_stats()}

    @property
    def _own_place(self) -> tuple[int, int] | None:
        """See `RoundState`; the workers of a membership may be others than those that saved."""
        return None if self._elastic is not None else self._place

    def extra_repr(self) -> str:
        """The rank and the options, one per line."""
        place = () if self._place is None else (f"rank {self._place[0]} of {self._place[1]}",)
        return "\n".join([*place, *(f"{name}={value}" for name, value in self._description.items())])

    @property
    def _rank(self) -> int:
        return super()._rank if self._place is None else self._place[0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        check_prefix(state_dict, prefix, self.module, wrapper=type(self).__name__)
        self.flush()
        self._own_weights.forget()
        self._unsynced_steps.forget()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GossipWrapper:
        """`.to()`, `.half()` and their like: what is in flight belongs to the old dtype and device."""
        self.flush()
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        state = self.__dict__.copy()
        if self._engine.is_asynchronous or self._elastic is not None:
            # Its threads answer for one model; a copy is a snapshot that stays local.
            state.update(_engine=IdleEngine(self._engine), _is_closed=True, _elastic=None)
        if self._elastic is not None:
            state["_node"] = None
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As the module's own would be, without `__reduce_ex__`."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError, where ranks are connected."""
        if self._place is None:
            return super().__reduce_ex__(protocol)
        raise TypeError(
            f"got a {type(self).__name__} to pickle, which torch.save does too, expected its state, since connections "
            "to other ranks are in no file; save state_dict() to train on, or averaged_state_dict() to use the model; "
            "copy.deepcopy makes copies"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._is_closed:
            self._steps.close()
            self._copies.close()
        else:
            self._own_weights.bind(self._add_again)
            self._steps.bind(self._round_after_step)
            hold(self, is_copy=True)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_scripting(type(self).__name__, "use torch.jit.script(model.module)")

    # What AveragingMixin needs.

    def _read(self) -> FlatVector:
        self.flush()
        self._share_buffers()
        self._to_numerator()
        return self._buffer.vector

    def _sum_over_ranks(self, x: Tensor) -> None:
        super()._sum_over_ranks(x)
        if self._node is not None:  # whose processes sum with those of the same place in other nodes
            self._node.share_buffers([x])

    def _write(self, vector: FlatVector) -> None:
        self._to_estimate()
        self._steps.write(self._buffer.parameters)


def close_when_collected(wrapper: object, engine: Engine) -> None:
    """Close `engine` when `wrapper` is collected, if nobody has closed it by then.

    [Note: Lost wrappers] The threads of an asynchronous engine outlive a wrapper that nobody closed, and would go on
    giving its model to peers.
    """
    weakref.finalize(wrapper, _close_lost, engine, type(wrapper).__name__).atexit = False  # at exit they just end


def _close_lost(engine: Engine, name: str) -> None:
    """Runs in whichever thread collects garbage, which must not wait for peers: so a thread of its own closes."""
    if engine.is_closed:
        return
    has_peers = engine.has_peers
    close_in_thread(engine)
    if has_peers:
        warnings.warn(f"a {name} was lost without close(): it leaves its peers now", ResourceWarning, stacklevel=2)
