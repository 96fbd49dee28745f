"""DiLoCo: the average drift of all ranks is the gradient of an outer optimizer, SGD with Nesterov momentum."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compression.compressor import Compressor
from ..registry import Paper
from ..rounds import SGD, Average, MakeOptimizer, Memory, Round, Vector, Vectors, described_with, is_number, step
from .error_feedback import compressed_average
from .late_steps import decide, keeps_steps
from .outer_method import OuterMethod
from .token_weights import TokenCount, total_weight


@dataclass(frozen=True)
class DiLoCo(OuterMethod):
    """DiLoCo: H steps alone, then a step of SGD with Nesterov momentum with the mean drift of all ranks as gradient.

    Every `sync_every` = H optimizer steps, with c = `lr` and b = `momentum`:

        D   <- 1/n  sum_j (phi - x_j)     # exact average over all ranks
        m   <- b m + D
        phi <- phi - c (D + b m)          # torch.optim.SGD(nesterov=True), to the bit
        x_i <- phi

    All ranks keep the same phi and m. The user's own optimizer takes the inner steps and keeps its state, as in the
    paper, where it is AdamW. With lr=1 and momentum=0 this is local SGD; with one worker it is SNOO (Kallusky et al.,
    2025, arXiv 2510.15830).

    With a `compressor` C ranks send messages in place of drifts, and later messages contain the left-out rest. With
    r = `error_decay` and e_i zero at first:

        e_i <- r e_i + (phi - x_i)
        q_i <- C(e_i)                     # the message of rank i, which every rank gets
        e_i <- e_i - q_i
        D   <- 1/n  sum_j q_j             # in place of the mean drift

    Entries that a message leaves out arrive late, and momentum amplifies late entries. With the default rates C must
    send at least about half of a drift at once. `QSGD(4, bucket_size=32, unbiased=True)` does. `QSGD(4)`, which sends a
    quarter, and codes of only the largest entries make quadratic problems diverge. Such codes need less momentum, or
    none, as in `SparseLoCo`.

    If ranks train on different amounts of data, weighted_by="tokens" weighs their drifts, with T_i the tokens that rank
    i has counted by `GossipDataParallel.count_tokens` since its last outer step, and s_i the number of
    its calls, one for each optimizer step:

        D   <- sum_j w_j (phi - x_j) / sum_j w_j,  w_j = T_j^2 / s_j

    With a `delay`, arrival="adaptive" keeps the steps of the delay where the drifts of the ranks agree, and drops them
    where they do not. cos is the mean cosine of all pairs of drifts, weighted by their norms:

        cos >= 0.6:   x_i <- phi + (x_i - s_i)      # s_i: the model with which the round began
        cos < 0.4:    x_i <- phi
        between:      as in the outer step before; the first one keeps the steps

    Processes that hold one model together (`nprocs_per_node`, or shards) decide by the drifts of the whole model.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv 2311.08105,
    Algorithm 1.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next; 30 to 500 in the paper.
        lr: c, the learning rate of the outer optimizer.
        momentum: b, its momentum; 0 <= b < 1.
        optimizer: another outer optimizer, in place of lr and momentum: a function of parameters, such as
            `lambda parameters: torch.optim.Adam(parameters, lr=0.3)`, equal on all ranks. The function gets flat
            tensors, one for each dtype, so the optimizer must work element by element, without a closure. A checkpoint
            restores its state, such as momentum, and keeps the rates that the function sets. The function is called
            once when the model is wrapped, to compare ranks, and then for each anchor.
        compressor: C, a contraction, equal on all ranks. It takes one more copy of the model for e. None: drifts are
            sent uncompressed.
        error_decay: r, the share of the unsent rest e that is kept for the next outer step; 0 <= r <= 1.
        weighted_by: "tokens" for weights by tokens; None: all ranks have equal weights.
        arrival: see [Note: Late arrival] of `Periodic`; or "adaptive", without a compressor.

    Raises:
        ValueError: a rate is out of range, there are rates beside an optimizer, or there is an `error_decay` without a
            compressor; (outer steps) no rank has counted tokens, with weighted_by="tokens"; (when the model is wrapped)
            the function `optimizer` fails, or returns an optimizer of other parameters, or one whose step needs a
            closure.

    Example:
        >>> model = GossipDataParallel(model, algorithm=DiLoCo(sync_every=50, lr=0.7, momentum=0.9))
    """

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 0.7
    momentum: float = 0.9
    optimizer: MakeOptimizer | None = field(default=None, repr=False)
    compressor: Compressor | None = None
    error_decay: float = 1.0
    weighted_by: Literal["tokens"] | None = None

    summary: ClassVar[str] = "trains alone, and takes a Nesterov step along the mean drift of all ranks every few steps"
    paper: ClassVar[Paper | None] = Paper(
        "Douillard et al.", "DiLoCo: Distributed Low-Communication Training of Language Models", "2023", "2311.08105"
    )
    averages_exactly: ClassVar[bool] = True
    has_equal_memory: ClassVar[bool] = True
    arrivals: ClassVar[tuple[str, ...]] = ("blend", "carry", "adaptive")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=self.momentum)
        self._check_optimizer(self.optimizer)
        if self.compressor is not None:
            self._check_error_feedback(self.compressor, error_decay=self.error_decay)
        elif not is_number(self.error_decay) or self.error_decay != DiLoCo.error_decay:
            raise ValueError(
                f"{type(self).__name__}: got error_decay={self.error_decay!r} without a compressor, expected one with "
                "it, since uncompressed drifts leave nothing out; pass for example "
                "compressor=QSGD(4, bucket_size=32, unbiased=True)"
            )

        if self.weighted_by not in (None, "tokens"):
            raise ValueError(
                f"{type(self).__name__}: got weighted_by={self.weighted_by!r}, expected 'tokens', or None for equal "
                "weights"
            )
        if self.arrival == "adaptive" and self.compressor is not None:
            raise ValueError(
                f"{type(self).__name__}: got arrival='adaptive' with compressor={self.compressor}, expected 'carry' or "
                "'blend': compressed messages do not tell how far the drifts agree"
            )

    @property
    def counts_tokens(self) -> bool:  # type: ignore[override]
        """See `Algorithm`."""
        return self.weighted_by == "tokens"

    @property
    def needs_current(self) -> bool:  # type: ignore[override]
        """See `Algorithm`; under overlap a round could count the tokens of the next step."""
        return self.counts_tokens

    @property
    def takes_rows(self) -> bool:  # type: ignore[override]
        """See `Algorithm`; ranks have weights and norms of their own."""
        return not self.counts_tokens and self.arrival != "adaptive"

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """See `Algorithm`; includes the outer optimizer with its settings."""
        return described_with(str(self), self.make_optimizer, dtypes)

    def make_optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """Make the outer optimizer.

        Args:
            parameters: the anchor, one flat tensor for each dtype; float32 or wider.
        """
        if self.optimizer is not None:
            return self.optimizer(parameters)
        return SGD(parameters, lr=self.lr, momentum=self.momentum)

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        phi = self.anchor(m)
        drift = m.scratch().sum_(phi, v.x, alpha=-1)
        yield from self.average(v, m, drift)
        self.outer_step(v, m, phi, drift)
        self.arrive(v, phi, carries=self.arrival != "adaptive" or keeps_steps(m))

    def average(self, v: Vectors, m: Memory, drift: Vector) -> Round:
        """drift <- the mean drift of all ranks, with the weights and the compressor of this algorithm.

        Args:
            v: see `round`.
            m: see `round`.
            drift: the drift of this rank; written.
        """
        count = TokenCount.of(m) if self.counts_tokens else None
        weight = None if count is None else count.weight(v)
        if count is not None and not count.steps and drift.norm() > 0:
            warnings.warn(
                f"{type(self).__name__}: got steps and no call of count_tokens() on this rank since its last outer "
                "step, expected a call for each step: its steps have no weight; if this is meant, call "
                "`model.count_tokens(0)`",
                stacklevel=2,
            )
        if self.compressor is None:
            yield from self._exact_average(v, m, drift, weight)
        else:
            yield from compressed_average(v, m, drift, self.compressor, self.error_decay, weight=weight)
        if count is not None:
            count.take_from(m)

    def _exact_average(self, v: Vectors, m: Memory, drift: Vector, weight: float | None) -> Round:
        if has_rest := m.has("error"):  # from a checkpoint of a run with a compressor; it is sent once, now
            drift.add_(m.vector("error", join="zero"))
        if weight is not None:
            drift.mul_(weight)
        norms = (drift.norm(),) if self.arrival == "adaptive" else ()
        numbers = yield Average(drift, norms if weight is None else (weight, *norms))
        if norms and v.sent is not None:  # without a delay there are no steps to keep
            decide(v, m, drift, numbers[:, -1])
        if weight is not None:
            drift.mul_(v.num_ranks / total_weight(numbers))
        if has_rest:
            m.forget("error")

    def outer_step(self, v: Vectors, m: Memory, phi: Vector, drift: Vector) -> None:
        """phi <- a step of the outer optimizer along the mean drift.

        Args:
            v: see `round`.
            m: see `round`.
            phi: the anchor; written.
            drift: the mean drift of all ranks; may be overwritten.
        """
        step(m.optimizer("outer", self.make_optimizer, phi), phi, drift)

    def recover(self, v: Vectors, m: Memory) -> None:
        """See `Algorithm`."""
        super().recover(v, m)
        if self.counts_tokens:
            TokenCount.reset(m)
