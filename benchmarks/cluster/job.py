"""What all ranks are told to do together, as a message."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.cluster.workload.delays import Delays

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks know.

    Args:
        method: of CLUSTER_METHODS.
        number: of the job in its run, which names all that is its own: keys of the store, ports.
        num_steps: of each rank.
        compute_seconds: of a step, waited.
        delays: of the ranks.
        learning_rate: of SGD.
        limit_seconds: for the whole job, and for every wait in it.
    """

    method: str
    number: int
    num_steps: int
    compute_seconds: float
    delays: Delays
    learning_rate: float = 1e-3
    limit_seconds: float

    @property
    def num_warm_steps(self) -> int:
        """See `Place`."""
        return 0

    def as_message(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"kind": type(self).__name__, **asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Self:
        """Of what `as_message` gave."""
        values = {name: value for name, value in message.items() if name != "kind"}
        return cls(**{**values, "delays": Delays(**values["delays"])})
