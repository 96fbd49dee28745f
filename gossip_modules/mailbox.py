"""Mailbox: one object with one lock between training and the threads that talk to peers."""

from __future__ import annotations

import threading

import torch

from .flat_vector import FlatVector
from .host_copy import HostCopy


class Mailbox:
    """What peers see of a rank, y, and what training has not applied yet, the mail.

    The training thread calls `publish` and `collect` at the safe point, threads of the engine `snapshot` and `deliver`
    at any time. All that a peer gets is a snapshot taken under the lock, so no message is ever half old and half new,
    and a correction is added to the mail, never written over parameters, so no update is lost.

    [Note: pinned mailbox] For parameters on a GPU, y and the mail are in pinned host memory. `publish` is a `HostCopy`,
    and the background threads wait for it before they read or change y. `collect` queues the way back in training's
    stream. So training never waits for the bus.

    Args:
        x: the parameters; y starts as a copy of them, which is not for peers yet.

    Attributes:
        is_open: whether peers may have y: from a `publish` on, until `withdraw`.

    Raises:
        ValueError: (`publish`, `collect`) x is not what it was: other tensors, dtypes or another device.
    """

    def __init__(self, x: FlatVector) -> None:
        self.lock = threading.RLock()
        self._device = x.raw.device
        self._is_pinned = x.raw.is_cuda
        self._layout = x.layout
        self._public = self.host_vector()
        self._mail: FlatVector | None = None  # with its parcel, made when they are first needed
        self._parcel: FlatVector
        self._arrived: FlatVector | None = None  # mail on the GPU
        self._applied: torch.cuda.Event
        self._has_mail = False
        self.is_open = False
        self._copy = HostCopy()
        self._written: torch.cuda.Event | None = None  # y, by the last copy from a GPU
        self.publish(x)
        self.withdraw()

    @property
    def has_mail(self) -> bool:
        """Whether `collect` would change anything."""
        return self._has_mail

    def host_vector(self) -> FlatVector:
        """A new vector like y: zeros in host memory, pinned if parameters are on a GPU."""
        raw = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        return FlatVector(self._layout, raw)

    def publish(self, x: FlatVector) -> None:
        """y <- x, in one copy. Called by the training thread."""
        self._check(x)
        with self.lock:
            self.is_open = True
            self._written = self._copy.write(self._public, x)

    def withdraw(self) -> None:
        """Until the next `publish` y is not for peers: parameters become something else, or must stay as they are."""
        with self.lock:
            self.is_open = False

    def collect(self, x: FlatVector) -> bool:
        """x <- x + mail, and no mail is left; returns whether there was any. Called by the training thread."""
        self._check(x)
        with self.lock:
            if not self._has_mail:
                return False
            assert self._mail is not None
            if self._is_pinned and self._arrived is None:  # here: it belongs to training's stream
                self._arrived, self._applied = x.like(), torch.cuda.Event()
            elif self._is_pinned:
                self._applied.synchronize()  # the parcel before this one has left the memory that mail goes to now
            self._mail, self._parcel, self._has_mail = self._parcel, self._mail, False
            if self._arrived is None:
                x.add_segments_(self._parcel, alpha=1.0)
                return True
            self._arrived.raw.copy_(self._parcel.raw, non_blocking=True)
            self._applied.record(torch.cuda.current_stream(x.raw.device))
            x.add_segments_(self._arrived, alpha=1.0)
            return True

    def snapshot(self, out: FlatVector) -> None:
        """out <- y. `out`: a `host_vector()` of the caller's."""
        self._wait_for_y()  # without the lock, which training may want
        with self.lock:
            self._wait_for_y()
            out.raw.copy_(self._public.raw)

    def deliver(self, correction: FlatVector, *, alpha: float) -> None:
        """y <- y + alpha * correction, and the same to the mail."""
        self._wait_for_y()
        with self.lock:
            self._wait_for_y()
            self._public.add_segments_(correction, alpha=alpha)
            if self._mail is None:
                self._mail, self._parcel = self.host_vector(), self.host_vector()
            if self._has_mail:
                self._mail.add_segments_(correction, alpha=alpha)
            else:
                for mail, part in zip(self._mail.segments, correction.segments, strict=True):
                    torch.mul(part, alpha, out=mail)
            self._has_mail = True

    def _check(self, x: FlatVector) -> None:
        if x.raw.device != self._device or (x.layout is not self._layout and x.layout != self._layout):
            raise ValueError(
                f"got a model of {x.layout.num_bytes} bytes on {x.raw.device} whose dtypes, trained tensors or device "
                f"changed since it was wrapped ({self._layout.num_bytes} bytes on {self._device}), expected the same: "
                "peers may ask for it at any time; call .to() and requires_grad_() before wrapping"
            )

    def _wait_for_y(self) -> None:
        """[Note: pinned mailbox]"""
        if (written := self._written) is not None:
            written.synchronize()
