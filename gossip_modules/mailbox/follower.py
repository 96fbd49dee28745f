"""follow: the saved models of a run, for processes outside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

from torch import Tensor

from ..membership.background_log import log
from ..transport.deadline import as_timeout
from .clock import Clock
from .errors import MailboxError
from .folder import PARTS
from .job import MailJob, Settings, read_run
from .medium import REAL_TIME, Medium, key_of, open_medium
from .saved_models import SavedModels
from .sealed import JOB


class NoRun(MailboxError):
    """There is no run at an address."""


def open_run(address: str, *, key: str | bytes | None = None, timeout: float, clock: Clock = REAL_TIME) -> Medium:
    """Open the store of a run that has begun.

    Args:
        address: see `follow`.
        key: see `follow`.
        timeout: see `Medium`.
        clock: see `Medium`.

    Raises:
        NoRun: the first worker has not come yet, or the address is wrong.
        MailboxError: the key opens no object of the run; or the store refuses the request.
    """
    folder = address.removeprefix("file://")
    if address.startswith("file://") and not os.path.isdir(os.path.join(folder, PARTS)):
        medium = None  # to open it would make the folder
    else:
        medium = open_medium(address, timeout=timeout, key=key_of(key), clock=clock)
    if medium is None or JOB not in medium.list():
        raise NoRun(f"there is no run at {address}; see whether the address is right, and start its workers first")
    if read_run(medium) is None:
        raise MailboxError(
            f"the object {JOB!r} of the run at {address} did not open; set GOSSIP_JOB_KEY to the key of its workers, "
            "or unset it if they have none"
        )
    return medium


class FollowedModel(NamedTuple):
    """A model of a run.

    round: the number of rounds before it.
    state_dict: the state dict of the module without its wrapper, on the CPU.
    is_average: whether all workers agree on this model; else it is the model of one worker.
    """

    round: int
    state_dict: Mapping[str, Tensor]
    is_average: bool


class Follower(Iterator[FollowedModel]):
    """The saved models of a run; see `follow`.

    Args:
        address: see `follow`.
        key: see `follow`.
        poll: see `follow`.
        timeout: see `follow`.
        clock: see `follow`.
    """

    def __init__(
        self, address: str, *, key: str | bytes | None, poll: float, timeout: timedelta | float, clock: Clock
    ) -> None:
        self.address, self.poll, self.timeout = address, poll, as_timeout(timeout).total_seconds()
        self._key, self._clock = key, clock
        self._job: MailJob | None = None
        self._last = -1

    def newest(self) -> FollowedModel | None:
        """Read the newest model of the run, also one that the iterator has given; None: the run has none yet.

        Raises:
            NoRun: there is no run.
            MailboxError: the store refuses the request, or the key does not open the objects.
        """
        return self._read(after=-1)

    def __next__(self) -> FollowedModel:
        """Wait for a newer model than the last one.

        Raises:
            StopIteration: all workers have left or are silent, and the last model was given.
            MailboxError: no newer model has come within `timeout`; and see `newest`.
        """
        start = self._clock.now()
        while True:
            is_late = self._clock.now() - start > self.timeout
            try:
                has_ended = self._opened().has_ended()  # before the look for a model, which a worker writes first
                if (found := self._read(after=self._last)) is not None:
                    self._last = found.round
                    return found
            except NoRun:
                if is_late:
                    raise
            else:
                if has_ended:
                    log.warning(
                        "%s: all workers have left or are silent; round %d was the last", self.address, self._last
                    )
                    raise StopIteration
            if is_late:
                raise MailboxError(
                    f"{self.address}: no newer model than that of round {self._last} came within {self.timeout:g} s; "
                    "see python -m gossip_modules.mailbox for its workers, or give a longer timeout"
                )
            self._clock.sleep(self.poll)

    def _opened(self) -> MailJob:
        if self._job is None:
            medium = open_run(self.address, key=self._key, timeout=self.timeout, clock=self._clock)
            self._job = MailJob(medium, Settings.of_reader(poll=self.poll, timeout=self.timeout))
        return self._job

    def _read(self, *, after: int) -> FollowedModel | None:
        saved = SavedModels(self._opened().medium).load(after=after)
        return None if saved is None else FollowedModel(saved.round, saved.model, saved.is_average)


def follow(
    address: str,
    *,
    key: str | bytes | None = None,
    poll: float = 5.0,
    timeout: timedelta | float = 600.0,
    clock: Clock = REAL_TIME,
) -> Follower:
    """The newest saved model of a run, again and again, for evaluation and serving outside the run.

    Nothing is written to the run, and its workers do not know of this process. If several models were saved since the
    last one, the newest is given. The iterator ends when all workers have left or are silent, and logs that.

    Args:
        address: of the run, as its workers have it.
        key: the key of the workers; None: the variable GOSSIP_JOB_KEY.
        poll: seconds between two looks at the store.
        timeout: the longest wait for a newer model, for the run to begin, or for the store, in seconds.
        clock: the clock of all waits.

    Raises:
        ValueError: the address has another scheme, or a number is out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from gossip_modules import DiLoCo, GossipDataParallel, Membership
        >>> from gossip_modules.mailbox import follow
        >>> membership = Membership("memory://example", min_workers=1)
        >>> model = GossipDataParallel(nn.Linear(2, 1), algorithm=DiLoCo(sync_every=2), membership=membership)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for step in membership.steps(5):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> model.close()
        >>> served = nn.Linear(2, 1)
        >>> for number, state_dict, is_average in follow("memory://example"):  # in another process
        ...     _ = served.load_state_dict(state_dict)
        ...     print(number, is_average)
        2 True
    """
    if not poll > 0:
        raise ValueError(f"got poll={poll!r}, expected seconds above 0")
    return Follower(address, key=key, poll=poll, timeout=timeout, clock=clock)
