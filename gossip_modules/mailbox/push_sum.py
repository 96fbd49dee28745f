"""PushSumByMail: push-sum whose shares lie in a mailbox until their receiver comes; nobody waits."""

from __future__ import annotations

from ..algorithms.sgp import PushSum
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from .by_mail import ByMail
from .letters import Letter, Letters, in_host_memory

_LEAST_WEIGHT = 1 / 16  # of a worker that sends
_MOST_UNREAD = 2  # shares that a worker has on their way to another one


class PushSumByMail(ByMail):
    """Push-sum by mail: each worker has an estimate z_i of the mean and a weight w_i, one at the start.

    A round of worker i, at any time, with the out-peers j of a graph over the live workers:

        mail/<j>/<i>/...  <-  z_i and the weight P_ji w_i, for each j                 # a share
        w_i <- w_i - sum_j P_ji w_i
        for each share (z, v) in mail/<i>/:  z_i, w_i <- (w_i z_i + v z) / (w_i + v), w_i + v

    In the words of push-sum, x_i = w_i z_i is sent and received. The sums of w and of w z over models and mail are
    constant, up to the steps of optimizers: a share is in a model, in the mail, or back at its sender, see [Note:
    Letters] of `Letters`. A worker that dies takes its own share along, and nothing else. Weights are kept beside the
    model and the model is sent as it is, so a share of a narrow dtype has no rounding, and buffers are weighted like
    parameters.

    The optimizer steps on z, as in training without gossip, so it moves the sum of w z by w_i times its step. A worker
    that takes more steps than others sends more often, so its weight is smaller, and workers at different paces count
    about equally. Weights in the mail take no steps: with one peer and equal paces a model has about .6 between rounds.

    A joining worker begins with the last saved model and the weight one, so the sum of w grows by one. `close()` reads
    the mail of this worker and gives its whole weight to a live one, with a last share: a worker that leaves takes no
    training along. Its own model stays as it is.

    A worker with a weight below 1/16 sends nothing, since its share would hardly count. A worker that has left two
    shares of another one unread gets no further share from it. So a worker that lives without reading, as during a long
    evaluation, does not collect the weight of all others, whose steps would then count for nothing.

    Kempe, Dobra, Gehrke, "Gossip-Based Computation of Aggregate Information", FOCS 2003; Assran, Rabbat, "Asynchronous
    Gradient Push", IEEE Transactions on Automatic Control 2020, arXiv 1803.08950.

    Attributes:
        weight: w_i, without shares that have come and are not applied yet.
    """

    weight = 1.0

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`: the columns sum to one, so a worker keeps the rest of its weight."""
        PushSum().check(mixing)

    def _write(self, letters: Letters, sent: FlatVector, t: int, live: list[int]) -> None:
        """See `ByMail`."""
        if self.weight < _LEAST_WEIGHT:
            return
        rank, mixing, weight = live.index(self.job.number), self._choose(len(live)), self.weight
        for peer in mixing.graph.out_peers(rank, t):
            if letters.num_unread(live[peer]) < _MOST_UNREAD:
                share = mixing.weights(peer, t).inp[rank] * weight
                letters.post(live[peer], {"weight": share}, sent)
                self.weight -= share

    def _apply(self, letter: Letter, s: FlatVector) -> None:
        """See `ByMail`."""
        share = float(letter.header["weight"])
        self.weight += share
        part = share / self.weight
        s.combine_segments_(1 - part, [letter.vector], [part])

    def _hand_over(self, letters: Letters, s: FlatVector, deadline: float) -> None:
        """See `ByMail`: a worker that has left reads its mail once more after that, so it or this one has the share."""
        own, sent = self.job.number, in_host_memory(s)
        while self.weight and (live := self.job.live(deadline=deadline)):
            receiver = min(live, key=lambda number: (number < own, number))
            letters.post(receiver, {"weight": self.weight}, sent)
            self.weight = 0.0
            letters.deliver(deadline=deadline)
            letters.settle(self.job.live(deadline=deadline), deadline=deadline)
            self._land(s)
