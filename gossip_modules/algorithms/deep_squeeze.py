"""DeepSqueeze: gossip of compressed models, with the error of compression fed back."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..compression.compressor import Compressor, checked_compressor
from ..mixing_manager.base import MixingManager
from ..mixing_manager.spectra import checked_step_size
from ..registry import Paper
from ..rounds import Algorithm, Memory, Round, Share, Vectors


@dataclass(frozen=True)
class DeepSqueeze(Algorithm):
    """DeepSqueeze: each rank sends its compressed model, and adds the error of compression to its next message.

    A round on rank i with the neighbours j, after the local SGD step; e_i is zero at first:

        v_i = x_i + e_i
        q_i = C(v_i)
        send q_i to all neighbours, receive their q_j
        e_i = v_i - q_i
        x_i = x_i + step_size sum_j W_ij (q_j - q_i)

    The model itself is compressed instead of a shrinking difference, so the ranks agree only up to the error of
    compression times the step size. In return a rank needs no copies of its neighbours' models: the graph may change
    from round to round, and the memory has the size of the model.

    Tang et al., "DeepSqueeze: Decentralization Meets Error-Compensated Compression", 2019, arXiv 1907.07346,
    Algorithm 1.

    Args:
        compressor: the compressor C; any.
        step_size: the consensus step size, eta in the paper; 0.01 for signs on a ring of 8.

    Raises:
        ValueError: `compressor` is not a compressor, or `step_size` is not positive.

    Example:
        >>> model = GossipDataParallel(model, push_sum=False, algorithm=DeepSqueeze(SignNorm(), step_size=0.01))
    """

    compressor: Compressor
    _: KW_ONLY
    step_size: float

    summary: ClassVar[str] = "sends compressed models, and adds the compression error to the next message"
    paper: ClassVar[Paper | None] = Paper(
        "Tang, Lian, Qiu, Yuan, Zhang, Zhang, Liu",
        "DeepSqueeze: Decentralization Meets Error-Compensated Compression",
        "2019",
        "1907.07346",
    )
    takes_wire_dtype: ClassVar[bool] = False
    is_skippable: ClassVar[bool] = False
    needs_symmetric_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checked_compressor(self.compressor)
        object.__setattr__(self, "step_size", checked_step_size(self))

    def step_size_on(self, mixing: MixingManager) -> float:
        """See `Algorithm`."""
        return self.step_size

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        e = m.vector("error", average="on_request", join="zero")
        rest = e.plus(v.x)
        q = v.encode(self.compressor, rest, rest=rest)
        received = yield Share(q)
        e.set_(rest)
        received.add_to(v.x, alpha=self.step_size)
