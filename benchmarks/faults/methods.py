"""The wrappers of the table, each around a tiny model, as a training script makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import nn

from gossip_modules import (
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    PairwiseDataParallel,
    RingGraph,
    SignNorm,
)
from gossip_modules.extend import GossipWrapper

Wrapper = AllReduceDataParallel | GossipWrapper


def make(name: str, module: nn.Module, *, rank: int, addresses: Sequence[str], timeout: timedelta) -> Wrapper:
    """The wrapper of that name around `module`; collective, except for dpwa, whose workers are at `addresses`."""
    return _MAKERS[name](module, rank, addresses, timeout)


def _gossip(**options: object) -> Callable[[nn.Module, int, Sequence[str], timedelta], Wrapper]:
    return lambda module, rank, addresses, timeout: GossipDataParallel(module, timeout=timeout, **options)  # type: ignore[arg-type]


def _choco(module: nn.Module, rank: int, addresses: Sequence[str], timeout: timedelta) -> Wrapper:
    ring = RingGraph(len(addresses), peers_per_itr=2)
    choco = Choco(SignNorm(), step_size=0.4)
    return GossipDataParallel(module, graph=ring, push_sum=False, algorithm=choco, timeout=timeout)


def _pairwise(module: nn.Module, rank: int, addresses: Sequence[str], timeout: timedelta) -> Wrapper:
    peers = {f"w{peer}": address for peer, address in enumerate(addresses)}
    return PairwiseDataParallel(module, name=f"w{rank}", peers=peers, timeout=timeout, init_from_peers=False)


_MAKERS: dict[str, Callable[[nn.Module, int, Sequence[str], timedelta], Wrapper]] = {
    "allreduce": lambda module, rank, addresses, timeout: AllReduceDataParallel(module, timeout=timeout),
    "sgp": _gossip(),
    "osgp": _gossip(overlap=True),
    "dpsgd": _gossip(push_sum=False),
    "choco": _choco,
    "adpsgd": lambda module, rank, addresses, timeout: BilatGossipDataParallel(module, timeout=timeout),
    "wagma": lambda module, rank, addresses, timeout: GroupAverageDataParallel(module, timeout=timeout),
    "diloco": _gossip(algorithm=DiLoCo(sync_every=5)),
    "dpwa": _pairwise,
}
