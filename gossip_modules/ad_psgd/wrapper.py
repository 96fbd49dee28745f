"""BilatGossipDataParallel: AD-PSGD, asynchronous pairwise averaging."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..flat.nonfinite import check_policy
from ..gossip.mixer import GlobalAverage
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from ..transport.connect import connect
from ..transport.process_group import DEFAULT_TIMEOUT
from ..wrappers.base import GossipWrapper
from ..wrappers.defaults import choose_bipartite_mixing
from .engine import BilateralEngine
from .watched_transport import WatchedTransport


class BilatGossipDataParallel(GossipWrapper):
    """AD-PSGD: pairs of ranks average while both go on training, and no rank ever waits for another.

    Odd ranks are active: at a training forward, unless the last exchange is still under way, they ask a passive peer.
    Even ranks are passive: a thread answers for them, whatever training does. Both get half the difference of what
    they sent each other as a correction, which their next training forward adds to the parameters; so no gradient
    step is lost, and the sum over ranks is that of all steps. The optimizer, its state and the loop are the user's own.

    Ranks take steps at their own pace; `Progress` counts those of all. Ranks should `close()` at about the same time.

    Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, arXiv
    1710.06952, Algorithm 1 and the bipartite protocol of its section 3. `BilateralEngine` in ad_psgd/engine.py shows a
    step as pseudo-code, `BilateralAverage` in ad_psgd/exchange.py an exchange.

    Args:
        module: mutated: its trained tensors become views of one flat vector.
        graph: bipartite, one peer per round; None = pairs at exponential distances where the world is even, else every
            active rank meets every passive one in turn.
        mixing: the weights over that graph; None = one half each.
        process_group: a Gloo group, used as it is, so it must carry nothing else; None = a new one over all ranks.
        init_sync: start from the parameters and buffers of rank 0.
        gossip_buffers: whether floating-point buffers (BatchNorm statistics) are averaged too, or stay local.
        gossip_in_eval_mode: whether forwards in eval mode (frozen BatchNorm statistics, no dropout) with grad enabled
            are training forwards too.
        on_nonfinite: what to do about a difference of two models that holds infinities or NaN. "raise":
            FloatingPointError at both of them, "skip": leave it out at both, which `comm_stats()` counts, "spread": do
            not look.
        timeout: for every wait on a peer. The death of a process is raised at the next step, without waiting for it.

    Raises:
        FloatingPointError: (forward, `flush()`) see `on_nonfinite`.
        ValueError: arguments that do not fit, or ranks that disagree on model, graph, mixing or options.
        RuntimeError: torch.distributed is not initialised.
        TimeoutError, ConnectionError: (construction, forward, `flush()`, collectives) a peer is late or has died; names
            it, also where another rank has found out.

    Example:
        >>> model = BilatGossipDataParallel(model)  # was: DistributedDataParallel(model)
        >>> for x, y in loader:
        ...     loss = criterion(model(x), y)  # adds what peers have said, then computes
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        graph: GraphManager | None = None,
        mixing: MixingManager | None = None,
        process_group: dist.ProcessGroup | None = None,
        init_sync: bool = True,
        gossip_buffers: bool = True,
        gossip_in_eval_mode: bool = False,
        on_nonfinite: str = "raise",
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(module, gossip_buffers=gossip_buffers, gossip_in_eval_mode=gossip_in_eval_mode)
        x = self._buffer.vector
        hello = self._hello(process_group, timeout=timeout)
        mixing = choose_bipartite_mixing(graph, mixing, world_size=hello.world_size)
        description = {
            "graph": repr(mixing.graph),
            "mixing": repr(mixing),
            "options (gossip_buffers, init_sync, gossip_in_eval_mode, on_nonfinite)": repr(
                (gossip_buffers, init_sync, gossip_in_eval_mode, check_policy(on_nonfinite))
            ),
        }
        self._agree(hello, description, init_sync=init_sync)
        self._transport = connect(
            process_group, module_device=x.raw.device, comm_device="cpu", backend="gloo", timeout=timeout
        )
        self._engine = BilateralEngine(mixing, self._transport, x, on_nonfinite=on_nonfinite)
        self._watched = WatchedTransport(self._transport, self._engine.join_in)
        self._averager = GlobalAverage(self._watched)
        self._close_when_collected()

    def _release(self) -> None:
        self._watched.close()
        self._transport.close()

    @property
    def _bytes_sent(self) -> int:
        return self._transport.num_bytes_sent + self._watched.num_bytes_sent

    def settle(self) -> None:
        """See `AveragingMixin`: when all ranks have asked no more, what they have said is applied.

        Until its next training forward a rank has nothing to say to those who ask, so that its model stays what it is
        now, whatever others do meanwhile: all checkpoints are of one moment.
        """
        if isinstance(self._engine, BilateralEngine):  # not that of a copy
            self._engine.raise_if_failed()  # at every call, unlike flush(): the others would wait in vain
        self.flush()
        self._meet("waiting until no rank asks")
        self._withdraw()
        self.flush()
        self._meet("waiting until no rank answers")

    def _meet(self, what: str) -> None:
        self._watched.all_reduce(torch.zeros(1), what=what)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._withdraw()
        super()._load_from_state_dict(*args, **kwargs)

    def _withdraw(self) -> None:
        """The model is about to be replaced, or to be saved: exchanges with what it was would undo that."""
        if isinstance(self._engine, BilateralEngine):  # not that of a copy
            self._engine.withdraw()
