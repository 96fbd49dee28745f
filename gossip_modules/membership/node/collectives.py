"""NodeCollectives: what averages over all workers of a membership need, in each process of a node."""

from __future__ import annotations

from torch import Tensor

from .siblings import Siblings


class NodeCollectives:
    """Collectives over all workers of a membership, for each process of a node: the first one gives the result.

    Args:
        siblings: of this process.
    """

    is_elastic = True  # see `Transport`: the first process goes on where another node fails
    num_bytes_sent = 0  # the transports inside and between nodes count them

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings

    def __deepcopy__(self, memo: dict[int, object]) -> NodeCollectives:
        """Copies of a wrapper are snapshots, which send nothing."""
        return self

    @property
    def rank(self) -> int:
        """Of the node."""
        return self._siblings.membership.rank

    @property
    def world_size(self) -> int:
        """The number of nodes."""
        return self._siblings.membership.world_size

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`: the sum over all nodes, each of which counts once."""
        membership = self._siblings.membership
        self._siblings.share(x, lambda: membership.transport.all_reduce(x, what=what), what=what)
