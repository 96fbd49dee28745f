"""Batches: the batches that a sequence of keys names, read ahead by loader processes."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from train.job.errors import DataError
from train.job.preemption import ignore_signals
from train.tasks.images.images import BatchKey, Images


class Batches(Iterator[tuple[Tensor, Tensor]]):
    """images[key] for each of `keys`, in their order, whatever the number of loader processes.

    With CUDA, batches are in pinned memory, so that a copy to the device may overlap with computing. Processes start
    with the first batch that is asked for and end with the last one, with an error, or with `close`.

    Args:
        images: what is read.
        keys: may be without end.
        num_workers: loader processes; 0: batches are read when they are asked for.
        timeout_seconds: longest wait for a loader process.

    Raises:
        DataError: by `next`, a file cannot be read.
        RuntimeError: by `next`, a loader process was killed, or did not answer within the timeout. That one was killed,
            torch may also raise from wherever the main thread is.
    """

    def __init__(self, images: Images, keys: Iterable[BatchKey], *, num_workers: int, timeout_seconds: float) -> None:
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        self._worker_pids = torch.zeros(num_workers, dtype=torch.int64, device="cpu").share_memory_()
        # batch_size=None: a key is a whole batch. The generator of our own keeps the loader from drawing a seed for its
        # workers from the global one, which a resumed run has just restored.
        self._loader: DataLoader[Any] = DataLoader(
            _Told(images),
            batch_size=None,
            sampler=keys,
            num_workers=num_workers,
            timeout=timeout_seconds if num_workers else 0,
            worker_init_fn=functools.partial(_start_worker, self._worker_pids),
            generator=torch.Generator().manual_seed(0),
            pin_memory=torch.cuda.is_available(),
        )
        self._batches: Any = None
        self._is_closed = False

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._is_closed:
            raise StopIteration
        if self._batches is None:
            self._batches = iter(self._loader)
            _close_at_exit(self)
        try:
            batch = next(self._batches)
            if isinstance(batch, DataError):
                raise batch
            return batch
        except (RuntimeError, ConnectionError, EOFError) as error:  # the last two: of a batch that died with its sender
            self.close()
            if not self.num_workers:
                raise
            raise RuntimeError(
                f"got no batch from {self.num_workers} loader processes ({error}), expected one within "
                f"{self.timeout_seconds:g} s; where the system killed one, memory was short: use fewer --num-workers"
            ) from error
        except BaseException:  # the end of the keys, or what a loader process has raised
            self.close()
            raise

    def close(self) -> None:
        """End the loader processes; idempotent. There are no batches after that."""
        if self._batches is not None and self.num_workers and not self._is_closed:
            # Not left to the end of the iterator, which the traceback of an error may keep alive.
            self._batches._shutdown_workers()
            # It has waited for them, and then sent a SIGTERM, which they ignore.
            for process in multiprocessing.active_children():
                if process.pid in self._worker_pids.tolist():
                    process.kill()
                    process.join()
        self._batches, self._is_closed = None, True


class _Told(Dataset[Any]):
    """images, with a DataError in the place of a batch: from a loader process torch would raise its traceback."""

    def __init__(self, images: Images) -> None:
        self._images = images

    def __getitem__(self, key: BatchKey) -> tuple[Tensor, Tensor] | DataError:
        try:
            return self._images[key]
        except DataError as error:
            return error


def _start_worker(pids: Tensor, worker: int) -> None:
    # A signal to all processes of a job asks the run for a checkpoint, and on the way there it still needs its loaders.
    ignore_signals()
    pids[worker] = os.getpid()


_open: WeakSet[Batches] = WeakSet()


def _close_at_exit(batches: Batches) -> None:
    """Where an error keeps a run from closing: Python would wait for ever for processes that ignore SIGTERM."""
    _open.add(batches)
    # Last registered is first called: before torch, which waits five seconds for each process.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    for batches in tuple(_open):
        batches.close()
