"""PairwiseDataParallel: each worker pulls the model of a random live peer and interpolates."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from datetime import timedelta
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..flat.selection import Selection, set_noise_source
from ..old_names import takes_old_arguments
from ..wrappers.base import GossipWrapper
from ..wrappers.composition import check_whole
from .average_on_demand import AverageOnDemand
from .averager import PairwiseWorker
from .config import DEFAULT_INTERPOLATION, DEFAULT_MAX_DISTANCE, DEFAULT_TIMEOUT, PairwiseConfig
from .engine import PairwiseEngine
from .interpolation import Interpolation

if TYPE_CHECKING:
    from typing_extensions import Self


class PairwiseDataParallel(PairwiseWorker, GossipWrapper):
    """A module that moves towards the model of a random live peer before every training forward (dpwa).

    x <- x + f (x_peer - x): see [Note: Pairwise round] of `PairwiseEngine`. No worker waits for another: a fetch runs
    in the background and is merged at the first training forward after it is complete. Workers may start late, die,
    restart and come back. No process group is needed: a worker knows the others by their addresses. A failed worker is
    avoided, and found again
    later: see `PeerScores`. Merging is one-sided, so the mean over workers is not kept.

    Peers get the model from the beginning, and nothing between `load_state_dict` and the next training forward. Load
    checkpoints on all workers before any of them trains on, or they merge models of before. A copy (`deepcopy`, pickle)
    is a local snapshot: it computes, reports and loads state, but has no address and no peers.

    Messages are fixed binary headers and raw tensors over TCP; nothing is ever unpickled, sizes are checked before
    anything is read, and models with infinities or NaN are refused. Without TLS everybody with access to the address
    can read the model, and a stranger at the address of a peer can have another model merged.

    Jin, Yuan, Iandola, Keutzer, "How to scale distributed deep learning?", 2016, arXiv 1611.04581 (pull-gossip SGD).
    `PairwiseEngine` in dpwa/engine.py shows a round as pseudo-code.

    Args:
        module: mutated: its trained tensors become views of one flat vector, with their values. On its device, in its
            dtype: both must stay.
        name: the name of this worker.
        peers: "tcp://host:port" of every worker by name; the own entry is where to bind ("tcp://0.0.0.0:45000").
        interpolation: f: `ConstantInterpolation`, `ClockInterpolation` or `LossInterpolation`.
        divergence_threshold: merges become smaller below this loss: see `DivergenceThreshold`; 0 = none.
        fetch_probability: the probability of asking a peer in a round.
        timeout: the limit of one round, in seconds or as a timedelta, for all peers tried in it. Training does
            not wait for it.
        seed: the seed of the choice of peers; each worker's choices are its own.
        on_nonfinite: "raise" or "spread": the reaction to infinities or NaN in the own model. See
            `PairwiseConfig`.
        max_distance: from the own model; a peer's model further away is refused. See `PairwiseConfig`.
        average_timeout: the timeout of `averaged()`, `average_()` and `consensus_distance()`, for all ranks together;
            None = `timeout` if you give one, else 10 s.
        server_ssl: the TLS context for serving. See `PairwiseConfig`.
        client_ssl: the TLS context for fetching. Give both or none.
        init_from_peers: start from the model of a live peer if there is one, after a late start or a restart. Workers
            with a common start begin with their own models: give them equal weights by `torch.manual_seed`.
        gossip_buffers: whether running statistics (BatchNorm) travel too; a sequence of names or patterns = those
            floating-point buffers in their place; see `Selection`.
        ignore: names of parameters and buffers to leave local, also at the start, such as "head.bias", or patterns,
            such as "adapter.*"; in addition to the module's `_ddp_params_and_buffers_to_ignore`.
        gossip_in_eval_mode: whether forwards in eval mode (frozen BatchNorm statistics, no dropout) with grad enabled
            are training forwards too.
        rounds: when a worker merges: see `GossipDataParallel`.

    Raises:
        ValueError: invalid arguments.
        ConnectionError: the own address cannot be bound.
        RuntimeError: (forward) a loss is needed and was not reported, or a background thread failed.
        FloatingPointError: (forward, eval, flush) the own model holds infinities or NaN.

    Example:
        >>> peers = {"w0": "tcp://127.0.0.1:*"}  # and the others, with their ports
        >>> model = PairwiseDataParallel(nn.Linear(2, 1), name="w0", peers=peers)
        >>> loss = model(torch.ones(4, 2)).square().mean()
        >>> loss.backward()
        >>> model.report_loss(loss.item())
        >>> model.close()
    """

    @property
    def _engine(self) -> PairwiseEngine:  # type: ignore[override]
        """In a copy a `PairwiseRecord`."""
        engine: Any = self._local.engine
        return engine

    @takes_old_arguments()
    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        peers: Mapping[str, str],
        interpolation: Interpolation = DEFAULT_INTERPOLATION,
        divergence_threshold: float = 0.0,
        fetch_probability: float = 1.0,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        seed: int = 0,
        on_nonfinite: str = "raise",
        max_distance: float = DEFAULT_MAX_DISTANCE,
        average_timeout: timedelta | float | None = None,
        server_ssl: ssl.SSLContext | None = None,
        client_ssl: ssl.SSLContext | None = None,
        init_from_peers: bool = True,
        gossip_buffers: bool | Sequence[str] = True,
        ignore: Sequence[str] = (),
        gossip_in_eval_mode: bool = False,
        rounds: str = "forward",
    ) -> None:
        config = PairwiseConfig(
            name,
            peers,
            interpolation,
            divergence_threshold,
            fetch_probability,
            timeout,  # type: ignore[arg-type]  # seconds are taken too
            seed,
            on_nonfinite=on_nonfinite,
            max_distance=max_distance,
            average_timeout=average_timeout,  # type: ignore[arg-type]
            server_ssl=server_ssl,
            client_ssl=client_ssl,
        )
        flags: dict[str, Any] = {"gossip_in_eval_mode": gossip_in_eval_mode, "rounds": rounds}
        check_whole(module, what="PairwiseDataParallel")
        super().__init__(module, selection=Selection(gossip_buffers, ignore), **flags)
        buffer = self._local.buffer
        self._local.who = f"worker {name!r}: "
        set_noise_source(module, sorted(config.peers).index(config.name))
        engine = PairwiseEngine(buffer, config, init_from_peers=init_from_peers)
        self._start(engine, AverageOnDemand(buffer.vector.raw.device, config.time_to_average))

    @classmethod
    def from_config(cls, module: nn.Module, name: str, path: str | PathLike[str], **options: Any) -> Self:
        """Worker `name` of a YAML file of dpwa: see `PairwiseConfig.from_yaml`.

        Args:
            module: see the class.
            name: the name of the worker in the file.
            path: the file.
            options: further arguments of the class.
        """
        config = PairwiseConfig.from_yaml(name, path)
        return cls(module, **{**vars(config), **options})

    def train(self, mode: bool = True) -> Self:
        """As `GossipWrapper.train`; on the way to eval mode the last update is published, as no round may follow."""
        was_training = self.training
        super().train(mode)
        local = self._local
        if was_training and not mode and not local.is_held and not local.holds_other_weights():
            with torch.no_grad():
                self._engine.republish(local.buffer.vector)
        return self

    def close(self) -> None:
        """See `AveragingMixin`. A fetch under way is abandoned."""
        self._engine.close()
        super().close()

    def _release(self) -> None:
        self._local.averager.close()

    def report_loss(self, loss: float) -> None:
        """The loss of the last batch, for merges by loss and for `divergence_threshold`; call it after every batch."""
        self._engine.report_loss(loss)

    @property
    def last_peer(self) -> str | None:
        """The peer of the last merge; None before."""
        return self._engine.last_peer
