"""PairwiseAverager: pairwise averaging of a plain module, driven by the training loop; and the base of both forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..flat.buffer import FlatBuffer
from ..flat.selection import Selection
from ..flat.vector import FlatVector
from ..loop.copies import WeightCopies
from ..loop.hooks import Observer
from ..old_names import takes_old_arguments
from ..state import branch
from ..wrappers.averaging import AveragedModel, AveragingMixin
from ..wrappers.composition import check_inside, claim, release
from .average_on_demand import AverageOnDemand
from .config import PairwiseConfig
from .engine import PairwiseEngine


class PairwiseWorker(AveragingMixin):
    """A model served at an address, with peers that may change."""

    _engine: PairwiseEngine

    @property
    def address(self) -> str:
        """The address of this worker, as configured, with the port chosen for `*`."""
        return self._engine.server.address

    @takes_old_arguments()
    def add_peer(self, name: str, address: str) -> None:
        """See `PairwiseEngine.add_peer`; from any thread."""
        self._engine.add_peer(name, address)

    def remove_peer(self, name: str) -> None:
        """See `PairwiseEngine.remove_peer`; from any thread."""
        self._engine.remove_peer(name)

    @property
    def worker(self) -> str:
        """See `AveragingMixin`."""
        return self._engine.config.name

    def declare_regions(self, regions: object) -> None:
        """Refused for names.

        Args:
            regions: anything.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"got regions {regions} of ranks, expected none: peers of dpwa have names; add up by name")

    def comm_stats(self) -> dict[str, float]:
        """The communication of this worker so far; local and cheap.

        Returns:
            As `GossipWrapper.comm_stats`, where num_rounds counts merges, and: bytes_received, num_fetches (requests),
            num_failed_fetches (refused, timed out, broken off), num_refused_models (another shape, infinities or NaN in
            the model or its loss, too far from ours, or failed TLS), num_refused_losses (own losses, not finite and so
            not published), num_refused_connections (without a request in time, without trusted TLS, or too many),
            num_garbage_messages, num_unread_replies (the reader left or was too slow), num_models_sent, clock;
            and by the names of `Membership.stats`: live (this worker, and peers without a failed last request), joins
            (added peers, and peers with an answer again), deaths (failed requests to live peers, also before their
            first answer), deadline (of a request, in seconds).
        """
        statistics = self._engine.statistics()
        return {**statistics, **super().comm_stats()}

    def _round_stats(self) -> dict[str, float]:
        return self._engine.round_stats()

    @property
    def _bytes_sent(self) -> int:
        averager: Any = self._local.averager
        return int(self._engine.statistics()["bytes_sent"] + averager.num_bytes_sent)


class ServedModel(AveragedModel):
    """The model of a `PairwiseAverager`, for peers to fetch.

    Args:
        buffer: has the parameters.
        engine: serves them, and merges the models of peers.
        averager: see `AveragedModel`.
    """

    averager: AverageOnDemand
    engine: PairwiseEngine = branch()

    def __init__(self, buffer: FlatBuffer, engine: PairwiseEngine, averager: AverageOnDemand) -> None:
        self.buffer, self.engine, self.averager = buffer, engine, averager
        self._copies = WeightCopies(buffer, name=PairwiseAverager.__name__)
        self._observer = Observer(buffer, [self._copies])

    @property
    def copies(self) -> WeightCopies:
        """See `AveragedModel`."""
        return self._copies

    def close(self) -> None:
        """Copies get the changes of the parameters for the last time; idempotent."""
        self._observer.close()
        self._copies.close()

    def attached(self) -> FlatVector:
        """The vector; the tensors of the module are views of it."""
        if not self.buffer.is_attached():
            self.buffer.attach()
        return self.buffer.vector

    @torch.no_grad()
    def merge(self) -> bool:
        """Wait for the fetch under way, and merge it; returns whether the model was changed."""
        if self.copies.masters.is_looking:
            self.copies.masters.look()
        is_written = self.engine.flush(self.attached())
        if is_written:
            self.buffer.written()
        if self.copies.masters.follows_rounds:
            self.copies.masters.after_round()
        return is_written

    def flush(self) -> None:
        """Merge a fetch under way."""
        if self.engine.is_in_flight and not self.is_averaged:
            self.merge()

    def read(self) -> FlatVector:
        """See `AveragedModel`."""
        self.flush()
        return self.attached()

    def write(self, vector: FlatVector) -> None:
        """See `AveragedModel`."""
        self.buffer.written()


class PairwiseAverager(PairwiseWorker):
    """Pairwise averaging of a plain module, driven by the training loop: dpwa's adapter.

    `update_send` before the batch and `update_wait` after it: the fetch runs under the batch, and peers get
    the model before it. Everything else is as in `PairwiseDataParallel`.

    Args:
        module: mutated: its trained tensors become views of one flat vector, with their values.
        config: as the arguments of `PairwiseDataParallel`.
        init_from_peers: see there.
        gossip_buffers: see there.
        ignore: see there.

    Raises:
        ValueError, ConnectionError, RuntimeError: see there.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> config = PairwiseConfig("w0", {"w0": "tcp://127.0.0.1:*"})  # and the others, with their ports
        >>> averager = PairwiseAverager(model, config)
        >>> averager.update_send(loss=1.0)
        >>> loss = model(torch.ones(4, 2)).square().mean()  # and backward and step
        >>> averager.update_wait(loss.item())
        False
        >>> averager.close()
    """

    def __init__(
        self,
        module: nn.Module,
        config: PairwiseConfig,
        *,
        init_from_peers: bool = True,
        gossip_buffers: bool | Sequence[str] = True,
        ignore: Sequence[str] = (),
    ) -> None:
        check_inside(module, wrapper=type(self).__name__)
        self.module = module
        buffer = FlatBuffer(module, selection=Selection(gossip_buffers, ignore))
        self._engine = PairwiseEngine(buffer, config, init_from_peers=init_from_peers)
        averager = AverageOnDemand(buffer.vector.raw.device, config.time_to_average)
        self._local: ServedModel = ServedModel(buffer, self._engine, averager)
        claim(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"got worker {self._engine.config.name!r} to copy or pickle, expected its `module`, as a worker owns "
            "threads and sockets; copy the module, and save state_dict()"
        )

    def update_send(self, loss: float | None = None) -> None:
        """Before a batch: serve the model as it is, and start to fetch a peer's. Never waits.

        Args:
            loss: the loss of the training so far; None = as last told, or not known yet.
        """
        if loss is not None:
            self._engine.report_loss(loss)
        with torch.no_grad():
            self._engine.publish(self._local.attached())

    def update_wait(self, loss: float | None = None) -> bool:
        """After a batch: wait for the fetch, for `timeout` at most since it began, and merge it.

        Args:
            loss: the loss of this batch; None = as last told.

        Returns:
            Whether the module was changed: not where no peer had a model for us.
        """
        if loss is not None:
            self._engine.report_loss(loss)
        return self._local.merge()

    def flush(self) -> None:
        """See `AveragingMixin`."""
        self._local.flush()

    def close(self) -> None:
        """See `AveragingMixin`. A fetch under way is given up, not waited for."""
        release(self)
        self._local.close()
        self._engine.close()
        self._local.averager.close()

    def state_dict(self) -> dict[str, Any]:
        """Clock, loss, scores and generators, without the module, after a flush: plain values."""
        self.flush()
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict()`, after the module has restored its own.

        A fetch under way is dropped, and peers get no model until the next `update_send`.
        """
        self._engine.load_state_dict(state)
