"""TokenCount: the weight of a rank by the tokens and the steps of its drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..rounds import Memory, Vectors

WeightedBy: TypeAlias = Literal["tokens", "num_tokens", "num_steps"]


class TokenCount(NamedTuple):
    """The tokens and the calls of `count_tokens` on this rank since its last outer step, as `Memory.numbers` has them.

    An outer step that is lost leaves the count as it is, so that the longer drift of the next one has its longer count.

    Attributes:
        tokens: T.
        steps: s, the number of calls.
    """

    tokens: float
    steps: float

    @classmethod
    def of(cls, m: Memory) -> TokenCount:
        """Return the present count of a memory."""
        return cls(*(m.numbers.get(name, 0) for name in cls._fields))

    def weight(self, v: Vectors, by: WeightedBy) -> float:
        """Return the weight of this rank.

        Args:
            v: the argument of `Algorithm.round`.
            by: the name of the law in `WEIGHTS`.

        Raises:
            ValueError: processes that hold one model together have counted different numbers.
        """
        weight = WEIGHTS[by](self)
        sums = torch.tensor([1, weight, weight**2], dtype=torch.float64, device="cpu")
        v.sum_over_shards(sums)
        num_shards, total, squared = sums.tolist()
        if num_shards * squared - total**2 > 1e-9 * total**2:
            raise ValueError(
                f"got {int(self.tokens)} tokens in {int(self.steps)} steps on this process, and other "
                "numbers on the other processes that hold the model together with it, expected equal numbers: the "
                "shards of one model have one weight; pass the sum over these processes to count_tokens(), on each"
            )
        return weight

    def take_from(self, m: Memory) -> None:
        """Subtract this count at the end of a round: tokens that were counted during a delay stay."""
        for name, count in self._asdict().items():
            m.numbers[name] = max(m.numbers.get(name, 0) - count, 0)  # `recover` may have set it to zero

    @classmethod
    def reset(cls, m: Memory) -> None:
        """Drop the present count of a memory."""
        m.numbers |= dict.fromkeys(cls._fields, 0)


WEIGHTS: Mapping[str, Callable[[TokenCount], float]] = {
    "tokens": lambda count: count.tokens**2 / max(count.steps, 1),
    "num_tokens": lambda count: count.tokens,
    "num_steps": lambda count: count.steps,
}
"""The laws of weights, by the value of `DiLoCo.weighted_by`."""


def total_weight(numbers: Tensor) -> float:
    """The sum of the weights of all ranks.

    Args:
        numbers: the numbers of all ranks, float64 [n, k]; the first one of a rank is its weight.

    Raises:
        ValueError: all weights are zero.
    """
    if not (total := float(numbers[:, 0].sum())) > 0:
        raise ValueError(
            "got weights by tokens or steps (weighted_by=) and no count on any rank since the last outer step, "
            "expected one; call `model.count_tokens(batch.numel())` in each step"
        )
    return total
