"""PairsByMail: AD-PSGD by mail; two workers average while both train on, and neither waits for the other."""

from __future__ import annotations

from ..flat.vector import FlatVector
from .by_mail import ByMail
from .letters import Letter, Letters


class PairsByMail(ByMail):
    """AD-PSGD by mail: an active worker asks, a passive one answers, and no step of either is lost.

    Rounds of an active worker i and of a passive worker j, each at its own time:

        i: if none of its letters is unread:  mail/<j>/<i>/...  <-  x_i, with a = 1/2        # a request
        j: for each request, with its model y of this round:
               c = a (y - x_i);  y <- y - c
               mail/<i>/<j>/...  <-  c;  x_j <- x_j - c                                      # an answer
        i: x_i <- x_i + c

    Both ends apply the same numbers, and all steps that they have taken meanwhile stay. So the sum of x over models and
    mail is constant up to the steps of optimizers, however late an answer comes. A request counts for nothing until its
    receiver answers. An answer counts once: at its receiver, or back at its sender, if the receiver is silent; see
    [Note: Letters] of `Letters`. A worker that dies takes its model along, with the answers that it has taken.

    A pair has half of its difference left after an exchange. As i sends one request at a time, each difference is
    corrected by about one half, also where answers are late.

    Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, arXiv
    1710.06952, Algorithm 1.
    """

    def _write(self, letters: Letters, sent: FlatVector, t: int, live: list[int]) -> None:
        """See `ByMail`: ask the partner of this round."""
        rank, mixing = live.index(self.job.number), self._choose(len(live))
        if not (mixing.graph.is_passive(rank) or letters.posted):
            for peer, weight in mixing.weights(rank, t).inp.items():
                letters.post(live[peer], {"weight": weight}, sent)

    def _answer(self, letters: Letters, sent: FlatVector) -> None:
        """See `ByMail`: answer the requests; the own part of each stays among the letters that have come."""
        arrived, letters.arrived = letters.arrived, []
        for letter in arrived:
            if "weight" not in letter.header:
                letters.arrived.append(letter)
            elif letter.sender != self.job.number:  # else it comes back, and nobody has answered it
                correction, weight = letter.vector, float(letter.header["weight"])
                correction.combine_segments_(-weight, [sent], [weight])
                letters.post(letter.sender, {"sign": 1.0}, correction)
                letters.arrived.append(Letter(self.job.number, {"sign": -1.0}, correction))
                sent.add_segments_(correction, alpha=-1.0)

    def _apply(self, letter: Letter, s: FlatVector) -> None:
        """See `ByMail`."""
        s.add_segments_(letter.vector, alpha=letter.header["sign"])
