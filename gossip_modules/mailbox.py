"""Mailbox: one object with one lock between training and the threads that talk to peers."""

from __future__ import annotations

import threading

import torch

from .flat_vector import FlatVector


class Mailbox:
    """What peers see of a rank, y, and what training has not applied yet, the mail.

    The training thread calls `publish` and `collect` at the safe point, threads of the engine `snapshot` and `deliver`
    at any time. All that a peer gets is a snapshot taken under the lock, so no message is ever half old and half new,
    and a correction is added to the mail, never written over parameters, so no update is lost.

    [Note: pinned mailbox] For parameters on a GPU, y and the mail are in pinned host memory. `publish` copies x on the
    GPU, in training's stream, and that copy to the host on a side stream; the background threads wait for it before
    they read or change y. `collect` queues the way back in training's stream. So training never waits for the bus.

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
        self._public, self._mail, self._parcel = self.host_vector(), self.host_vector(), self.host_vector()
        self._has_mail = False
        self.is_open = False
        if self._is_pinned:
            self._stream = torch.cuda.Stream(x.raw.device)
            self._published, self._applied = torch.cuda.Event(), torch.cuda.Event()
            self._twin = x.like()
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
            if not self._is_pinned:
                self._public.raw.copy_(x.raw)
                return
            training = torch.cuda.current_stream(x.raw.device)
            training.wait_event(self._published)  # the last copy to the host reads the twin
            self._twin.raw.copy_(x.raw)
            self._stream.wait_stream(training)  # the twin is written before it is copied
            with torch.cuda.stream(self._stream):
                self._public.raw.copy_(self._twin.raw, non_blocking=True)
                self._published.record(self._stream)

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
            if self._is_pinned:
                self._applied.synchronize()  # the parcel before this one has left the memory that mail goes to now
            self._mail, self._parcel, self._has_mail = self._parcel, self._mail, False
            if not self._is_pinned:
                x.add_segments_(self._parcel, alpha=1.0)
                return True
            training = torch.cuda.current_stream(x.raw.device)
            training.wait_event(self._published)  # the twin is free
            self._twin.raw.copy_(self._parcel.raw, non_blocking=True)
            self._applied.record(training)
            x.add_segments_(self._twin, alpha=1.0)
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
        if self._is_pinned:
            self._published.synchronize()
