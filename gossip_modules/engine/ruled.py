"""RuledEngine: rounds of an update rule, which carries vectors from one to the next."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from ..flat.buffer import FlatBuffer
from ..flat.vector import FlatVector
from ..gossiper.mixer import Mixer
from ..mixing_manager.base import MixingManager
from ..schedule import Schedule
from ..transport.base import Transport, is_elastic
from ..update_rules.carried import Carried
from ..update_rules.rule import UpdateRule
from ..update_rules.sgd_momentum import SGDMomentum, SGDStep
from ..update_rules.step_rates import StepRates
from .engine import SyncEngine


class RuledEngine(SyncEngine):
    """In every step a round of an update rule, as `SyncEngine` runs plain ones: before the forward, and blocking.

    [Note: Rounds of a rule] A round hands the model that the optimizer has left to the rule, which mixes `sent` once or
    several times, and copies what the rule has made of it into the model. All mixings of round t are by W(t): if they
    took turns in a period of even length, each vector would meet every other matrix only. Beside the model there are
    `sent`, one vector for each that the rule carries, and the messages of the peers.

    Where other tensors are trained than before (layers frozen or added), what is carried starts from zero. So it does
    for a worker that joins, whose donor carried it before that; a checkpoint of other tensors is refused instead.

    [Note: Sums over workers] On an elastic transport a worker that dies takes with it what it carries, and one that
    joins brings what another one carries too. A rule that `keeps_sums` begins anew with each generation therefore, at
    the same step on all workers, as where it was started: what it has learnt of the differences between their data is
    learnt again. In the rounds between a death and the next generation the sum is wrong by what the dead one carried,
    about the size of a step. Other rules go on with what each worker has, and who joins with what its donor has.

    Args:
        gossiper: bound to its peers.
        rule: what a round computes.
        buffer: the tensors of the model, of which the rule may change the optimizer's momentum, and whose learning
            rates scale what the rule carries; None: the rates are taken to be constant.
        on_nonfinite: "raise" or "spread", see `LockstepEngine`.

    Raises:
        ValueError: weights that the rule is wrong with; (rounds) with the rates of the first step of SGD.
    """

    def __init__(
        self, gossiper: Mixer, rule: UpdateRule, buffer: FlatBuffer | None = None, *, on_nonfinite: str = "raise"
    ) -> None:
        super().__init__(gossiper, Schedule(), on_nonfinite=on_nonfinite)
        rule.check(gossiper.mixing)
        self.rule = rule
        self._carried: Carried | None = None
        self._loaded: dict[str, Any] = {}  # the state of what is carried, until the next round
        self._loaded_names: list[str] | None = None  # of its tensors, where a donor gave it
        self._momentum: SGDMomentum | None = None
        self._has_checked_step = False
        self._rates = StepRates(buffer) if rule.scales_with_rate and buffer is not None else None
        if rule.needs_sgd:
            assert buffer is not None, f"{rule} changes the optimizer of a model"
            self._momentum = SGDMomentum(
                buffer,
                rule=type(rule).__name__,
                takes_nesterov=rule.takes_nesterov,
                needs_gradients=rule.needs_gradients,
            )

    @property
    def state_name(self) -> str:
        """See `Engine`: each rule has a state of its own."""
        return f"{type(self.rule).__name__} engine"

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        start = time.perf_counter()
        self._check_first_step()
        self.step += 1
        with record_function("gossip.round", f"t={self.t}"):
            if self.on_nonfinite == "raise" and not self.agree_finite(self._is_finite(x)):
                self._refuse_nonfinite(self.gossiper, self.t, is_own=True)
            carried = self._carried_for(x)
            carried.take(x, None if self._rates is None else self._rates.take())
            step = None if self._momentum is None else self._momentum.take_step()
            self.rule.round(carried, lambda: self._mix(carried.sent), step if carried.num_rounds else None)
            self.t += 1
            carried.num_rounds += 1
            if self._momentum is not None:
                self._momentum.write(carried.vector("momentum"))
            carried.write_to(x)
        self.stats.wait_seconds += time.perf_counter() - start
        self.stats.record(0)
        return True

    def _check_first_step(self) -> None:
        """Before anything has changed. On an elastic transport one worker would end the training of others by it."""
        step = None if self._momentum is None else self._momentum.step
        if step is not None and not self._has_checked_step:
            if not is_elastic(self.gossiper.transport):
                self.rule.check_step(self.gossiper.mixing, step)
            self._has_checked_step = True

    def _mix(self, sent: FlatVector) -> None:
        self.gossiper.start(sent, self.t)
        self.gossiper.finish(sent)

    def _carried_for(self, x: FlatVector) -> Carried:
        """What is carried, on the device of x and with its tensors."""
        before, loaded = self._carried, self._loaded
        if before is not None and before.fits(x):
            return before
        if before is not None and before.has_tensors_of(x):
            loaded = before.state_dict()  # moved to another device
        elif before is not None or (loaded and self._loaded_names not in (None, x.layout.names)):
            loaded = {}
            warnings.warn(
                f"{self.rule}: other tensors are trained than before, so what it carries from round to round starts "
                "from zero",
                stacklevel=2,
            )
        carried = Carried(x, self.rule.vectors, scaled=self.rule.scales_with_rate)
        if loaded:
            carried.load_state_dict(loaded)
        self._carried, self._loaded = carried, {}
        return carried

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """See `LockstepEngine`: the momentum of the optimizer, where the rule writes it."""
        return () if self._momentum is None else self._carried_for(x).vector("momentum")

    def take_shared(self, x: FlatVector) -> None:
        """See `LockstepEngine`."""
        if self._momentum is not None:
            self._momentum.take_step()
            self._momentum.write(self.shared(x))

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `LockstepEngine` and [Note: Sums over workers]."""
        super().rebind(mixing, transport)
        if self.rule.keeps_sums:
            self._carried, self._loaded = None, {}

    def state_for_newcomer(self, x: FlatVector) -> dict[str, Any]:
        """See `LockstepEngine`; the first round of who joins moves by what it has missed, and makes no momentum."""
        names = self._loaded_names if self._carried is None else x.layout.names
        state = {**super().state_for_newcomer(x), "sgd_step": None, "names": names}
        is_of_others = self._carried is not None and not self._carried.has_tensors_of(x)
        return {**state, "carried": {}} if is_of_others else state

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`; shares memory with the engine, like that of a module."""
        carried = self._loaded if self._carried is None else self._carried.state_dict()
        step = None if self._momentum is None or self._momentum.step is None else list(self._momentum.step)
        rates = {} if self._rates is None else {"step_rates": self._rates.state_dict()}
        return {**super().state_dict(), "carried": carried, "sgd_step": step, **rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`; the next round uses it, and checks its shapes.

        Workers that come and go load one state, so of a rule that `keeps_sums` they load the counters only.
        """
        super().load_state_dict(state)
        begins_anew = self.rule.keeps_sums and is_elastic(self.gossiper.transport)
        self._carried, self._loaded = None, {} if begins_anew else copy.deepcopy(state["carried"])
        self._loaded_names = state.get("names")
        if self._rates is not None:
            self._rates.load_state_dict(state.get("step_rates", {}))  # older versions have none
        if self._momentum is not None:
            self._momentum.step = None if state["sgd_step"] is None else SGDStep(*state["sgd_step"])
            self._momentum.write(self._loaded["vectors"]["momentum"] if self._loaded else ())

    def reset(self) -> None:
        """See `Engine`: the next round carries nothing."""
        empty = {"t": 0, "step": 0, "gossiper": {}, "carried": {}, "sgd_step": None}
        self.load_state_dict({"engine": self.state_name, **empty})

    def forget_models(self) -> None:
        """See `Engine`: the next round carries nothing."""
        super().forget_models()
        self._carried, self._loaded = None, {}
        if self._momentum is not None:
            self._momentum.step = None
            self._momentum.write(())

    def close(self) -> None:
        """See `Engine`; keeps what `state_dict()` gives."""
        if self._carried is not None:
            self._loaded = self._carried.state_dict()
            self._carried = None
        for listener in (self._momentum, self._rates):
            if listener is not None:
                listener.close()
