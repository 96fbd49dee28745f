"""MailChoices: which methods fit to a mailbox, and the mixer of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..algorithms.d_psgd import DPSGD
from ..mixing_manager.base import MixingManager
from ..rounds.algorithm import Algorithm
from ..rounds.mixer import Mixer
from ..rounds.periodic import Periodic
from ..rounds.push_pull import PushPull
from ..wrappers.choices import Choices, PairChoices
from .mail_rounds import MailRounds
from .pairs import PairsByMail
from .push_sum import PushSumByMail

_KEPT_SIZES = 64  # MATCHA plans each graph, which takes a while


@dataclass(frozen=True)
class MailChoices:
    """The choices of a user for a run over a mailbox.

    Args:
        choices: the graph, the weights, the algorithm and the schedule of the user.

    Raises:
        ValueError: they do not fit to a mailbox; names the remedy.
    """

    choices: Choices

    def __post_init__(self) -> None:
        choices, algorithm = self.choices, self.choices.algorithm
        schedule = choices.schedule
        if schedule.average_every or schedule.average_until:
            raise ValueError(
                f"got {schedule} over a mailbox, expected no averages in the schedule, since workers take steps at "
                "their own pace; take LocalSGD(sync_every=H), or DiLoCo(sync_every=H, lr=1, momentum=0)"
            )
        if isinstance(algorithm, Mixer) or choices.wire_dtype is not None:
            raise ValueError(
                f"got {algorithm or choices.wire_dtype} over a mailbox, expected whole models or an outer method with "
                "a compressor; leave wire_dtype out, and take DiLoCo(compressor=Cast(torch.bfloat16)) for narrow drifts"
            )
        outer = algorithm.parts[0] if isinstance(algorithm, Algorithm) else None
        if isinstance(algorithm, Algorithm):
            self._check_algorithm(algorithm)
        every = outer.sync_every if isinstance(outer, Periodic) else schedule.gossip_every
        if every < 2 or getattr(outer, "gossip_every", 0) == 1:
            raise ValueError(
                "got a message in every step over a mailbox, expected several steps between two messages: a request "
                "to a store takes tens of milliseconds, and costs money; pass schedule=H, or sync_every=H, with an H "
                "whose steps take some seconds at least"
            )

    def _check_algorithm(self, algorithm: Algorithm) -> None:
        outer = algorithm.parts[0]
        is_alone = outer.averages_exactly and outer.can_recover and not outer.has_equal_memory
        has_links = outer.keeps_links or outer.keeps_models or outer.needs_static_graph
        needs_steps = not isinstance(outer, Periodic) and (outer.needs_current or outer.needs_sgd)
        # EagerDiLoCo writes the model before its request, by a number of ranks that only the close of a round decides.
        is_eager = isinstance(outer, Periodic) and outer.delay == outer.sync_every
        if len(algorithm.parts) > 1 or is_alone or has_links or needs_steps or is_eager:
            raise ValueError(
                f"got {algorithm} over a mailbox, expected a method of one message per round without state of links: "
                "who is in a round changes from round to round; take DiLoCo, MuLoCo, IsoLoCo, SparseLoCo, SlowMo, "
                "LocalSGD, NoLoCo, GASLoC, or gossip with schedule=H"
            )
        if getattr(outer, "collective", "all_gather") != "all_gather":
            raise ValueError(
                f"got {algorithm} over a mailbox, expected collective='all_gather': a round over a mailbox has one "
                "message of each worker, and a mean in two phases would need two; leave collective out"
            )
        if getattr(outer, "delay", 0) == "auto":
            raise ValueError(
                f"got {algorithm} over a mailbox, expected a number of steps as delay: workers measure no round "
                "together; pass delay=1, for example, or leave it out, as a round never waits longer than `grace`"
            )

    def mixer(self) -> Mixer:
        """The mixer of the rounds; not bound yet."""
        choices, algorithm = self.choices, self.choices.algorithm
        if isinstance(choices, PairChoices):
            return PairsByMail()
        chosen = algorithm if isinstance(algorithm, Algorithm) else DPSGD()
        if chosen.is_plain and choices.push_sum:
            return PushSumByMail()
        return MailRounds(chosen, PushPull())

    @cached_property
    def weights(self) -> Callable[[int], MixingManager]:
        """The weights as a function of the number of workers."""
        return lru_cache(maxsize=_KEPT_SIZES)(self.choices.for_any_size())
