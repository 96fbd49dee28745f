"""PushSumByMail: push-sum whose shares lie in a mailbox until their receiver comes; nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from ..algorithms.sgp import PushSum
from ..flat.vector import FlatVector
from ..membership.background_log import log
from ..mixing_manager.base import MixingManager
from ..rounds.push_pull import LEAST_WEIGHT
from ..state import transient
from .errors import Unavailable
from .job import MailJob
from .sealed import pack, unpack

_EXTRA = 1 << 16  # bytes of a share beside its tensors
_TAKEN = ".taken"


class MailedShare(NamedTuple):
    """A share whose receiver has perhaps not read it.

    Attributes:
        path: its path.
        receiver: the number of the receiver.
        data: the object, if the medium has not confirmed it; else None.
    """

    path: str
    receiver: int
    data: bytes | None = None


class PushSumByMail(PushSum):
    """Push-sum by mail: x_i <- P_ii x_i + all shares that lie in the mailbox of i; w_i likewise.

    A round of worker i, with the out-peers j of a graph over the live workers:

        x_i, w_i <- x_i, w_i + every share in mail/<i>/ that is not taken
        mail/<j>/<i>/<k> <- P_ji x_i, P_ji w_i
        x_i, w_i <- P_ii x_i, P_ii w_i

    The sum of w over models and mail is constant, and so is the sum of x, up to the steps of optimizers. A receiver may
    come at any time, so nobody waits, and a share is as old as its way was long. A worker with little weight left sends
    nothing: see [Note: weights that run dry] of `Neighbours`.

    [Note: Who has a share] A share counts once. Its receiver takes it by a create of mail/<j>/<i>/<k>.taken, and adds
    it only if this create is its own. If the receiver is silent, the sender takes the share back by the same create. So
    only a worker that dies takes mass along: its own. If the medium does not answer, the sender does not know whether
    the share was written. It counts as sent, and the sender writes the same bytes again in its next round.

    Kempe, Dobra, Gehrke, "Gossip-Based Computation of Aggregate Information", FOCS 2003.
    """

    job: MailJob
    _out: list[MailedShare] = transient([])  # shares of this worker that nobody has taken, as far as it knows
    _taken: set[str] = transient(set())  # the shares that this worker has taken, for stale lists
    _until = 0.0  # the deadline of the requests of this round
    is_weighted = True

    def join_run(self, job: MailJob, choose: Callable[[int], MixingManager]) -> None:
        """Send the shares through a run: see `MailDriver.join_run`."""
        self.job, self._choose = job, choose

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`: everything happens in `finish`."""
        self._t = t

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`. If the medium does not answer for `grace` seconds, the rest of the round is left out."""
        job = self.job
        self._until = job.clock.now() + job.settings.grace
        try:
            live = sorted(job.live(deadline=self._until))
            self._receive(s)
            self._settle(s, live)
            if s.push_sum_weight.item() >= LEAST_WEIGHT:
                self._send(s, live)
            job.beat(is_needed=False)
        except Unavailable as error:
            log.warning("worker %d: round %d by mail is left out: %s", job.number, self._t, error)

    def _receive(self, s: FlatVector) -> None:
        """Add the shares in the mail of this worker."""
        medium, own = self.job.medium, self.job.number
        found = medium.list(f"mail/{own:06d}/", deadline=self._until)
        taken = {path.removesuffix(_TAKEN) for path in found if path.endswith(_TAKEN)} | self._taken
        for path in sorted(path for path in found if not path.endswith(_TAKEN) and path not in taken):
            if self._take(path, s):
                self._taken.add(path)
                medium.delete([path])

    def _take(self, path: str, s: FlatVector) -> bool:
        """s <- s + the share, unless the other end has it; returns whether it was added."""
        medium, most = self.job.medium, 2 * s.layout.num_bytes + _EXTRA
        data = medium.get(path, max_bytes=most, deadline=self._until)
        if data is None or not self._claim(path):
            return False
        _, tensors = unpack(data, max_bytes=most)
        for own, share in zip(_parts(s), tensors, strict=True):
            own.add_(share.to(own.device))
        return True

    def _claim(self, path: str) -> bool:
        """Whether this end has the share: see [Note: Who has a share]."""
        return self.job.medium.create(path + _TAKEN, pack({"by": self.job.number}), deadline=self._until)

    def _settle(self, s: FlatVector, live: Collection[int]) -> None:
        """Write unsure shares again, take the shares of silent receivers back, and forget those that were taken."""
        medium, kept = self.job.medium, []
        for share in self._out:
            if share.receiver not in live:
                self._take(share.path, s)
                continue
            if share.data is not None:
                medium.create(share.path, share.data, deadline=self._until)
            if medium.get(share.path + _TAKEN, max_bytes=_EXTRA, deadline=self._until) is None:
                kept.append(share._replace(data=None))
        self._out = kept

    def _send(self, s: FlatVector, live: Sequence[int]) -> None:
        """Write a share for each out-peer, and keep the rest."""
        job, rank, mixing = self.job, live.index(self.job.number), self._choose(len(live))
        for peer in mixing.graph.out_peers(rank, self._t):
            weight = mixing.weights(peer, self._t).inp[rank]
            path = f"mail/{live[peer]:06d}/{job.number:06d}/{self._t:010d}"
            data = pack({}, [part * weight for part in _parts(s)])
            try:
                job.medium.create(path, data, deadline=self._until)
                self._out.append(MailedShare(path, live[peer]))
            except Unavailable:  # [Note: Who has a share]
                self._out.append(MailedShare(path, live[peer], data))
        job.note_write()
        own_weight = mixing.weights(rank, self._t).own
        for part in _parts(s):
            part.mul_(own_weight)


def _parts(s: FlatVector) -> list[Tensor]:
    """The tensors of a share: all segments, and the weight."""
    return [*(segment for segment in s.segments if segment.numel()), s.push_sum_weight]
