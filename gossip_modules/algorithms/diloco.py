"""DiLoCo: the average drift of all ranks is the gradient of an outer optimizer, SGD with Nesterov momentum."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compression.compressor import Compressor
from ..registry import Paper
from ..rounds import SGD, Average, MakeOptimizer, Memory, Round, Vector, Vectors, described_with, is_number, step
from .error_feedback import COLLECTIVES, compressed_average
from .late_steps import decide, keeps_steps
from .outer_method import OuterMethod
from .rda import RDA
from .token_weights import WEIGHTS, TokenCount, WeightedBy, total_weight


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

    A rank sends q_i to all n - 1 others. With collective="all_reduce" it sends about 2 q_i for each n: every rank
    averages one n-th of the q_j, and sends the code of this mean to all. e_i keeps what both codes leave out; see
    [Note: Coded averages] of `CodedAverage`.

    If ranks train on different amounts of data, `weighted_by` weighs their drifts, with T_i the tokens that rank i has
    counted by `GossipDataParallel.count_tokens` since its last outer step, and s_i the number of its calls, one for
    each optimizer step:

        D   <- sum_j w_j (phi - x_j) / sum_j w_j

        weighted_by="tokens":      w_j = T_j^2 / s_j    # tokens, times tokens in a step
        weighted_by="num_tokens":  w_j = T_j
        weighted_by="num_steps":   w_j = s_j

    A rank that misses an outer step, because a worker of a membership has died in it, keeps its count for the next one,
    as its drift is longer there. Steps are counted by the calls: the wrapper alone does not know them, since with
    rounds="manual" it is called once for many steps.

    merge=RDA() averages the lengths and the directions of drifts apart, for each tensor: see `RDA`.

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
        collective: "all_gather" or "all_reduce", with a compressor; the latter sends fewer bytes with three ranks or
            more, and takes one more copy of the model during an outer step. Not over a mailbox, nor with `weighted_by`.
        weighted_by: "tokens", "num_tokens" or "num_steps"; None: all ranks have equal weights.
        merge: `RDA()`, in place of the mean of drifts; without a compressor. None: the mean.
        arrival: see [Note: Late arrival] of `Periodic`; or "adaptive", without a compressor.

    Raises:
        ValueError: a rate is out of range, there are rates beside an optimizer, or there is an `error_decay` without a
            compressor; (outer steps) no rank has counted tokens, with `weighted_by`; (when the model is wrapped) the
            function `optimizer` fails, or returns an optimizer of other parameters, or one whose step needs a closure;
            or several processes hold one model in shards, with `merge`.

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
    collective: str = "all_gather"
    weighted_by: WeightedBy | None = None
    merge: RDA | None = None

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
        elif self.collective != DiLoCo.collective:
            raise ValueError(
                f"{type(self).__name__}: got collective={self.collective!r} without a compressor, expected one with "
                "it, since exact drifts are averaged by an all-reduce always; leave collective out, or pass for "
                "example compressor=Cast(torch.bfloat16)"
            )
        elif not is_number(self.error_decay) or self.error_decay != DiLoCo.error_decay:
            raise ValueError(
                f"{type(self).__name__}: got error_decay={self.error_decay!r} without a compressor, expected one with "
                "it, since uncompressed drifts leave nothing out; pass for example "
                "compressor=QSGD(4, bucket_size=32, unbiased=True)"
            )

        if self.collective not in COLLECTIVES:
            raise ValueError(
                f"{type(self).__name__}: got collective={self.collective!r}, expected one of "
                f"{', '.join(map(repr, COLLECTIVES))}; 'all_reduce' sends fewer bytes with three ranks or more"
            )
        if self.weighted_by is not None and self.collective != DiLoCo.collective:
            raise ValueError(
                f"{type(self).__name__}: got weighted_by={self.weighted_by!r} with collective={self.collective!r}, "
                "expected 'all_gather': the mean of codes in two phases has equal weights; leave collective out"
            )
        if self.weighted_by is not None and self.weighted_by not in WEIGHTS:
            raise ValueError(
                f"{type(self).__name__}: got weighted_by={self.weighted_by!r}, expected one of "
                f"{', '.join(map(repr, WEIGHTS))}, or None for equal weights"
            )
        if self.arrival == "adaptive" and self.compressor is not None:
            raise ValueError(
                f"{type(self).__name__}: got arrival='adaptive' with compressor={self.compressor}, expected 'carry' or "
                "'blend': compressed messages do not tell how far the drifts agree"
            )
        if self.merge is not None:
            self._check_merge(self.merge)

    def _check_merge(self, merge: object) -> None:
        name = type(self).__name__
        if not isinstance(merge, RDA):
            raise ValueError(f"{name}: got merge={merge!r}, expected RDA(), or None for the mean of drifts")
        if self.compressor is not None:
            raise ValueError(
                f"{name}: got merge={merge} with compressor={self.compressor}, expected one of them: ranks that use "
                "the lengths of drifts send them uncompressed; leave the compressor out"
            )
        if self.arrival == "adaptive":
            raise ValueError(
                f"{name}: got merge={merge} with arrival='adaptive', expected 'carry' or 'blend': the agreement of "
                "drifts is measured by their mean, which such ranks do not compute"
            )

    @property
    def counts_tokens(self) -> bool:  # type: ignore[override]
        """See `Algorithm`."""
        return self.weighted_by is not None

    @property
    def needs_current(self) -> bool:  # type: ignore[override]
        """See `Algorithm`; under overlap a round could count the tokens of the next step."""
        return self.counts_tokens

    @property
    def takes_rows(self) -> bool:  # type: ignore[override]
        """See `Algorithm`; ranks have weights and norms of their own."""
        return not self.counts_tokens and self.arrival != "adaptive" and self.merge is None

    @property
    def module_names(self) -> Sequence[str]:
        """See `Periodic`."""
        return (*super().module_names, *(() if self.merge is None else self.merge.without))

    def check_shards(self, nprocs_per_node: int) -> None:
        """See `Algorithm`."""
        super().check_shards(nprocs_per_node)
        if self.merge is not None:
            self.refuse_shards(nprocs_per_node, needs="the lengths of whole tensors")

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
        count = weight = None
        if self.weighted_by is not None:
            count = TokenCount.of(m)
            weight = count.weight(v, self.weighted_by)
            if not count.steps and drift.norm() > 0:
                warnings.warn(
                    f"{type(self).__name__}: got steps and no call of count_tokens() on this rank since its last outer "
                    "step, expected a call for each step: its steps have no weight; call "
                    "`model.count_tokens(batch.numel())`, or with 0 where a step has no tokens",
                    stacklevel=2,
                )
        if self.compressor is None:
            yield from self._exact_average(v, m, drift, weight)
        else:
            yield from compressed_average(
                v, m, drift, self.compressor, self.error_decay, weight=weight, collective=self.collective
            )
        if count is not None:
            count.take_from(m)

    def _exact_average(self, v: Vectors, m: Memory, drift: Vector, weight: float | None) -> Round:
        if has_rest := m.has("error"):  # from a checkpoint of a run with a compressor; it is sent once, now
            drift.add_(m.vector("error", join="zero"))
        if self.merge is not None:
            yield from self.merge.average(drift, weight)
        else:
            yield from self._mean(v, m, drift, weight)
        if has_rest:
            m.forget("error")

    def _mean(self, v: Vectors, m: Memory, drift: Vector, weight: float | None) -> Round:
        if weight is not None:
            drift.mul_(weight)
        norms = (drift.norm(),) if self.arrival == "adaptive" else ()
        numbers = yield Average(drift, norms if weight is None else (weight, *norms))
        if norms and v.sent is not None:  # without a delay there are no steps to keep
            decide(v, m, drift, numbers[:, -1])
        if weight is not None:
            drift.mul_(len(numbers) / total_weight(numbers))

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
