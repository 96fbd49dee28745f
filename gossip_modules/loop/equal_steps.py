"""Notices another tool that makes the models of ranks equal in each step, so that gossip changes nothing."""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.buffer import FlatBuffer
from ..flat.sharded import local_of
from ..state import transient
from ..transport.process_group import ProcessGroupTransport
from ..transport.stores import BoundedStore, ForeignValueError
from .hooks import StepListener, holds_any
from .moment import sample

_FIRST, _FACTOR = 3, 4  # comparisons begin at this step, and then at so many times the last one
_NUM_STEPS = 5  # of one comparison
_NUM_EQUAL = 3  # steps with equal parameters after different gradients
_NUM_RANKS = 8  # the first ones, whose fingerprints are compared
_NUM_PROBES = 6  # parameters that are compared
_MIN_ELEMENTS = 16  # of such a parameter
_MIN_SAMPLES = 8  # of it that a step has changed
_MIN_OPPOSITE = 4  # of these, with gradients of opposite signs on two ranks
_ULPS = 4  # a sample has changed if it did by more units in the last place
_SPREAD = 0.1  # relative standard deviation of the changes; below it the steps are signs of gradients


class Print(NamedTuple):
    """The fingerprint of one parameter after a step.

    Attributes:
        digest: a hash of the bits of its samples; empty without samples.
        changed: the samples that the step has changed, and whose gradients are not zero, one bit each.
        signs: the samples with a gradient above zero, one bit each.
    """

    digest: str
    changed: int
    signs: int

    def differs_in_gradients(self, other: Print) -> bool:
        """Whether the step has changed enough samples, many with gradients of opposite signs on two ranks."""
        both = self.changed & other.changed
        num_opposite = ((self.signs ^ other.signs) & both).bit_count()
        return both.bit_count() >= _MIN_SAMPLES and num_opposite >= max(_MIN_OPPOSITE, both.bit_count() // 8)


class EqualSteps(StepListener):
    """Raises an error where the models of ranks are equal after steps with different gradients.

    [Note: Equal after a step] Optimizers that share their work between ranks (a distributed Muon, Dion, Shampoo) step
    each parameter on one rank and send it to the others. Their models are equal after each step, so a round changes
    nothing, and each rank trains with gradients of the data of one rank. That is found by its effect: the samples of a
    parameter are bit-equal on two ranks after each step that is looked at, and three of these steps have changed them,
    not all by the same amount (as steps of signs do), where an eighth of the gradients or more had opposite signs.

    In a few steps, early ones and then ever more seldom, each rank puts fingerprints into the key-value store of the
    process group, and reads the ones of the step before. In that step a tool that synchronises ranks has met all of
    them, so all fingerprints are there, and all ranks find the same. Elsewhere no rank waits for another one.

    Args:
        buffer: has the parameters.
        name: the class of the wrapper, for messages.

    Attributes:
        start: the step at which the next comparison begins.
    """

    is_subscribed: bool = transient(False)
    start: int = transient(_FIRST)
    _store: BoundedStore | None = transient(None)
    _thread: int = transient(0)
    _probes: list[Tensor] = transient([])
    _places: list[int] = transient([])  # of the probes among the parameters
    _counts: Counter[tuple[int, int, int]] = transient(Counter())  # such steps, by two ranks and the probe
    _has_last: bool = transient(False)  # whether this rank has told of the step before
    _before: list[Tensor] = transient([])  # samples before the first step since the last round, and gradients
    _gradients: list[Tensor | None] = transient([])
    _written: dict[int, Tensor] = transient({})  # samples at the end of a step of the optimizer that has the parameter
    _has_own: bool = transient(False)  # whether these are from before the step of an optimizer of the parameters
    _stepper: str = transient("")

    def __init__(self, buffer: FlatBuffer, *, name: str) -> None:
        super().__init__(buffer)
        self._name = name

    def _clear(self) -> None:
        self._before, self._gradients, self._written = [], [], {}
        self._has_own, self._stepper = False, ""

    def before_round(self, step: int, transport: object) -> None:
        """Compare parameters with the ones of the next rank, if a comparison is under way; `step` is `start` or later.

        Raises:
            RuntimeError: they are equal without a reason.
            ForeignValueError: some ranks have the key of the job, and others do not.
        """
        if not isinstance(transport, ProcessGroupTransport) or transport.world_size == 1:
            self.start *= _FACTOR
            return
        if step == self.start:
            self._begin(transport)
            return
        try:
            if self._store is not None and self._probes[0] is self.buffer.parameters[self._places[0]]:
                self._compare(self._store, step, transport)
        except ForeignValueError:  # some ranks have the key of the job, and others do not
            raise
        except ConnectionError:  # of the store, which rounds do not need
            self._store = None
        finally:
            self._clear()
            if step >= self.start + _NUM_STEPS or self._store is None:
                self.close()
                self.start *= _FACTOR

    def end(self) -> None:
        """Compare no more: rounds wait for no rank, and a comparison waits for the store."""
        self.close()
        self.start = sys.maxsize

    def _begin(self, transport: ProcessGroupTransport) -> None:
        large = [k for k, x in enumerate(self.buffer.parameters) if local_of(x).numel() >= _MIN_ELEMENTS]
        self._places = large[:: max(1, -(-len(large) // _NUM_PROBES))]
        probes = [self.buffer.parameters[k] for k in self._places]
        if len(probes) != len(self._probes) or any(x is not y for x, y in zip(probes, self._probes, strict=True)):
            self._probes, self._counts = probes, Counter()
        self._has_last = False
        self._clear()
        self._store = transport.store("gossip_prints") if self._probes else None
        self._thread = threading.get_ident()
        if self._store is None:
            self.start *= _FACTOR
        else:
            self.subscribe()

    def _compare(self, store: BoundedStore, step: int, transport: ProcessGroupTransport) -> None:
        has_last, self._has_last = self._has_last, True
        text = " ".join(f"{digest}:{changed:x}:{signs:x}" for digest, changed, signs in self._prints())
        store.set(f"{step}/{transport.rank}", text, what="telling the fingerprints of a step")
        ranks = range(min(transport.world_size, _NUM_RANKS))  # on all ranks the same ones, so that all of them raise
        keys = [f"{step - 1}/{rank}" for rank in ranks]
        found = store.get_all(keys, what="reading the fingerprints of a step") if has_last else None
        prints = [[_print_of(part) for part in record.decode().split(" ")] for record in found or ()]
        for i, j in itertools.combinations(range(len(prints)), 2):
            for k, (own, other) in enumerate(zip(prints[i], prints[j], strict=False)):
                is_equal = bool(own.digest) and own.digest == other.digest
                self._counts[i, j, k] = (self._counts[i, j, k] + own.differs_in_gradients(other)) * is_equal
        equal = [place for place, count in self._counts.items() if count >= _NUM_EQUAL]
        if equal:
            self._refuse(equal, transport)

    def _prints(self) -> list[Print]:
        """The fingerprint of each probe after the steps since the last round."""
        if not self._before:
            return [Print("", 0, 0)] * len(self._probes)
        found = []
        for k, (before, gradient, probe) in enumerate(zip(self._before, self._gradients, self._probes, strict=True)):
            now = sample(probe)
            change = (now - before).float().abs()
            is_changed = change > _ULPS * torch.finfo(now.dtype).eps * before.float().abs()
            if gradient is None:
                found.append(Print("", 0, 0))
                continue
            sizes = change[is_changed]
            is_of_signs = sizes.numel() < _MIN_SAMPLES or bool(sizes.std() < _SPREAD * sizes.mean())
            changed = 0 if is_of_signs else _bits(is_changed & (gradient != 0))
            bits = self._written.get(k, now).contiguous().cpu().view(torch.uint8).numpy().tobytes()
            found.append(Print(hashlib.sha256(bits).hexdigest()[:16], changed, _bits(gradient > 0)))
        return found

    def _refuse(self, equal: Sequence[tuple[int, int, int]], transport: ProcessGroupTransport) -> None:
        names = {id(parameter): name for name, parameter in self.buffer.module.named_parameters()}
        which = ", ".join(repr(names.get(id(self._probes[k]), "")) for k in sorted({k for _, _, k in equal}))
        ranks = sorted({transport.names[rank] for i, j, _ in equal for rank in (i, j)})
        self.close()
        raise RuntimeError(
            f"got parameters of a {self._name} ({which}) that are equal on ranks {ranks} after each of {_NUM_EQUAL} "
            f"steps of {self._stepper or 'an optimizer'} with different gradients: another tool synchronises them, "
            "such as an optimizer that steps each parameter on one rank and sends it to the others (a distributed "
            "Muon, Dion or Shampoo), so that gossip changes nothing and models train with the gradients of one rank; "
            "expected an optimizer of each rank's own: the same class without sharing, one of torch.optim, or "
            "gossip_modules.MuonAdamW; or train with DistributedDataParallel, where gradients are equal"
        )

    # See `StepListener`.

    def concerns(self, optimizer: Optimizer) -> bool:
        """See `StepListener`: masters may be stepped in place of the parameters."""
        return True

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        is_own = holds_any(optimizer, self._probes)
        # Others are masters, or vectors of an outer optimizer inside a round.
        if threading.get_ident() != self._thread or (self._before and (self._has_own or not is_own)):
            return
        self._has_own = is_own
        self._before = [sample(x).clone() for x in self._probes]
        self._gradients = [None if x.grad is None or x.grad.is_sparse else sample(x.grad).clone() for x in self._probes]

    @torch.no_grad()
    def leave_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        if threading.get_ident() != self._thread:
            return
        for k, x in enumerate(self._probes):
            if holds_any(optimizer, [x]):
                self._written[k] = sample(x).clone()
                self._stepper = type(optimizer).__name__


def _bits(mask: Tensor) -> int:
    return sum(1 << k for k, is_set in enumerate(mask.tolist()) if is_set)


def _print_of(text: str) -> Print:
    digest, changed, signs = text.split(":")
    return Print(digest, int(changed, 16), int(signs, 16))
