"""RunReport: the workers, the rounds, the models and the costs of a run, as its objects show them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from .base import Listed
from .costs import Money, Prices, Requests, RoundCosts
from .job import MAX_HEADER, MailJob, Settings, places_of
from .medium import Medium
from .rounds import Stream

_PERIODS = 1.5  # of signs of life, for which the second look is waited
_LONGEST = 60.0  # seconds of this wait
_NUM_ROUNDS = 50  # whose duration is averaged
_MODEL = re.compile(r"model/(\d{10})")
_ROUND = re.compile(r"round/([^/]+)/(\d+)/(\w+)")
_BY = re.compile(r"(?:worker/(\d+)/beat|round/[^/]+/\d+/(\d+)|mail/\d+/(\d+)/\d+)")


@dataclass(frozen=True)
class WorkerReport:
    """A worker of a run.

    Attributes:
        number: its number.
        state: "live", "silent" (no sign of life between two looks) or "left".
        last_round: the number of the newest round with a message of it; None: no message is kept.
        step: the optimizer steps that it had taken when it sent a message that counts in the newest round of a stream;
            None: it does not count there.
    """

    number: int
    state: str
    last_round: int | None
    step: int | None


@dataclass(frozen=True)
class StreamReport:
    """The rounds of one fragment, of one kind.

    Attributes:
        name: of the stream: the fragment and the kind.
        newest: the number of the newest closed round.
        counted: the workers that count in it.
        late: the workers that have not left and do not count in it.
        seconds: from one close to the next, on average over the last 50; NaN: the store keeps no times, or coarse ones.
        costs: the law of the costs of a round.
    """

    name: str
    newest: int
    counted: tuple[int, ...]
    late: tuple[int, ...]
    seconds: float
    costs: RoundCosts


@dataclass(frozen=True)
class RunReport:
    """A run.

    Attributes:
        address: its address.
        workers: all workers, by number.
        streams: the streams with a closed round, by name.
        models: the numbers of the saved models, ascending.
        num_objects: the number of all objects.
        stored_bytes: their sizes together, with seals.
        num_refused: the objects that were read and did not open.
    """

    address: str
    workers: tuple[WorkerReport, ...]
    streams: tuple[StreamReport, ...]
    models: tuple[int, ...]
    num_objects: int
    stored_bytes: int
    num_refused: int

    def requests(self, seconds: float) -> Requests:
        """The least requests of all workers together in so many seconds."""
        rows = [tuple(seconds / s.seconds * x for x in s.costs.requests) for s in self.streams]
        return Requests(*map(sum, zip((0.0,) * 5, *rows, strict=True)))

    def money(self, prices: Prices) -> Money:
        """The least costs per hour."""
        return prices.hourly(self.requests(3600.0), seconds=3600.0, stored_bytes=self.stored_bytes)


def report_of(medium: Medium, *, wait: float | None, show: Callable[[str], object]) -> RunReport:
    """Look at a run twice.

    Args:
        medium: has the run.
        wait: the most seconds between the two looks; None: 1.5 periods of the signs of life, at most 60 s.
        show: called with a line of progress.
    """
    job = MailJob(medium, Settings.of_reader(poll=1.0, timeout=medium.timeout))
    before, clock = medium.list(), medium.clock
    numbers = sorted({number for number, _ in places_of(before)})
    present = {number for number in numbers if f"worker/{number:06d}/left" not in before}
    periods = [float(job.header(f"worker/{number:06d}/beat").get("period", 0.0)) for number in sorted(present)]
    limit = min(_PERIODS * max(periods, default=0.0) + 1.0, _LONGEST) if wait is None else wait
    if present:
        show(f"{len(present)} workers have not left; looking for their signs of life, for up to {limit:.0f} s")
    start, objects, live = clock.now(), before, set[int]()
    while present - live and clock.now() - start < limit:
        clock.sleep(min(1.0, limit))
        objects = medium.list()
        live = {number for path, entry in objects.items() if entry != before.get(path) for number in _writers(path)}
        present = {number for number in present if f"worker/{number:06d}/left" not in objects}
    steps: dict[int, int] = {}
    streams = tuple(_streams(job, objects, present, steps))
    messages = sorted((int(found[2]), path) for path in objects if (found := _ROUND.fullmatch(path)))
    last = {n: number for number, path in messages for n in _writers(path)}
    return RunReport(
        address=medium.address,
        workers=tuple(WorkerReport(n, _state(n, present, live), last.get(n), steps.get(n)) for n in numbers),
        streams=streams,
        models=_models(objects),
        num_objects=len(objects),
        stored_bytes=sum(entry.num_bytes for entry in objects.values()),
        num_refused=medium.counts.refused,
    )


def _state(number: int, present: Collection[int], live: Collection[int]) -> str:
    if number not in present:
        return "left"
    return "live" if number in live else "silent"


def _models(objects: Collection[str]) -> tuple[int, ...]:
    return tuple(sorted(int(found[1]) for path in objects if (found := _MODEL.fullmatch(path))))


def _writers(path: str) -> list[int]:
    """The worker that alone writes this object, or nobody."""
    found = _BY.fullmatch(path)
    return [int(number) for number in found.groups() if number] if found else []


def _streams(
    job: MailJob, objects: Mapping[str, Listed], present: Collection[int], steps: dict[int, int]
) -> Iterator[StreamReport]:
    """The streams with a closed round; adds the steps of the workers that count there to `steps`."""
    rounds: dict[str, dict[int, dict[str, Listed]]] = defaultdict(lambda: defaultdict(dict))
    for path, entry in objects.items():
        if found := _ROUND.fullmatch(path):
            rounds[found[1]][int(found[2])][found[3]] = entry
    models = _models(objects)
    model_bytes = objects[f"model/{models[-1]:010d}"].num_bytes if models else 0
    for name, parts_of in sorted(rounds.items()):
        closed = sorted(number for number, parts in parts_of.items() if "close" in parts)[-_NUM_ROUNDS:]
        if not closed or (close := Stream(job, name, max_bytes=MAX_HEADER).close_of(closed[-1])) is None:
            continue
        newest, counted = closed[-1], close.members
        steps.update(zip(counted, close.steps, strict=False))
        parts = parts_of[newest]
        sizes = [entry.num_bytes for part, entry in parts.items() if part.isdigit()]
        first, last = parts_of[closed[0]]["close"].time, parts["close"].time
        costs = RoundCosts(
            len(counted),
            sum(sizes) / max(len(sizes), 1),
            model_bytes=model_bytes if name.startswith("0-") else 0,
            save_every=max(models[-1] - models[-2], 1) if len(models) > 1 else newest + 1,
            num_read=None if "mean" in parts else len(counted) - 1,
        )
        late = tuple(sorted(set(present) - set(counted)))
        seconds = (last - first) / (newest - closed[0]) if last > first else math.nan  # S3 has whole seconds
        yield StreamReport(name, newest, counted, late, seconds, costs)
