"""ModelFetcher: fetches models in a thread of its own while training computes a batch."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch
from torch.profiler import record_function

from ...flat.vector import FlatVector
from .client import Fetched, ModelClient

GRACE_SECONDS = 5.0  # beyond the timeout of a round, for the copy and check of what has arrived


class ModelFetcher:
    """One fetch at a time, in a thread of its own: `start`, and then `wait` or `is_done`.

    For parameters on a GPU a model arrives in pinned memory and is copied to the GPU on a side stream before the fetch
    counts as done. The memory of the model belongs to the fetching thread from `start` until the future is done, and to
    the training thread otherwise, so there is no lock.

    Args:
        client: the client; used by the fetching thread only.
        x: the parameters, whose layout and device fetched models have.
        name: the name of this worker, for errors.
        timeout: the timeout of a fetch, in seconds.

    Attributes:
        arrived: the model that the last fetch has brought; valid until the next one starts.
    """

    def __init__(self, client: ModelClient, x: FlatVector, *, name: str, timeout: float) -> None:
        self.client, self.name, self.timeout = client, name, timeout
        self._future: Future[Fetched | None] | None = None
        self._jobs: queue.SimpleQueue[Future[Fetched | None] | None] = queue.SimpleQueue()
        raw = torch.zeros(x.layout.num_bytes, dtype=torch.uint8, pin_memory=x.raw.is_cuda, device="cpu")
        self._inbox = self.arrived = FlatVector(x.layout, raw)
        if x.raw.is_cuda:
            self.arrived = x.like()
            self._stream = torch.cuda.Stream(x.raw.device)
            self._read = torch.cuda.Event()

    @property
    def is_under_way(self) -> bool:
        """Whether a fetch has been started and not been waited for."""
        return self._future is not None

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._future is None or self._future.done()

    def start(self) -> None:
        """Start a fetch. On a GPU, everything that reads the last model must have been queued before."""
        assert self._future is None, "one fetch at a time"
        if self.arrived is not self._inbox:
            self._read.record(torch.cuda.current_stream(self.arrived.raw.device))
        self._future = Future()
        self._jobs.put(self._future)

    def wait(self) -> Fetched | None:
        """Wait for the fetch; whose model has arrived, None where none has. No fetch is under way afterwards.

        Raises:
            TimeoutError: the fetch takes much longer than its timeout; names the peer.
            RuntimeError: the fetch failed, though not because of the network; names the peer.
        """
        if self._future is None:
            return None
        start = time.monotonic()
        try:
            return self._future.result(self.timeout + GRACE_SECONDS)
        except FutureTimeoutError:
            raise TimeoutError(
                f"worker {self.name!r}: a fetch from {self.client.asked!r} did not end within "
                f"{time.monotonic() - start:.1f} s (timeout {self.timeout:g} s)"
            ) from None
        finally:
            self._future = None

    def stop(self) -> None:
        """Let `work()` end; a fetch that is under way is given up."""
        self._future = None
        self._jobs.put(None)
        self.client.stop()

    def work(self) -> None:
        """The body of the fetching thread, until `stop()`."""
        while (future := self._jobs.get()) is not None:
            try:
                future.set_result(self._fetch())
            except Exception as error:
                asked = self.client.asked
                failure = RuntimeError(f"worker {self.name!r}: fetching from {asked!r} failed: {error!r}")
                future.set_exception(failure)
                raise failure from error

    def _fetch(self) -> Fetched | None:
        with torch.no_grad(), record_function("gossip.fetch"):
            fetched = self.client.fetch(self._inbox, self.timeout)
            if fetched is None:
                self.client.bound.check_own()  # else the client has, beside the peer's
            elif self.arrived is not self._inbox:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(self._read)  # the last merge reads what this overwrites
                    self.arrived.raw.copy_(self._inbox.raw, non_blocking=True)
                self._stream.synchronize()  # the inbox is free, and training need not wait for this stream
        return fetched
