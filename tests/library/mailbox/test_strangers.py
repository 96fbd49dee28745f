"""A stranger that can write, overwrite and delete objects of a run cannot change its model."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gossip_modules import DiLoCo, NoLoCo, SparseLoCo, TopK
from gossip_modules.extend import Algorithm
from gossip_modules.mailbox.errors import MailboxError
from gossip_modules.mailbox.medium import Medium, open_medium
from gossip_modules.mailbox.report import report_of
from gossip_modules.mailbox.rounds import Close
from gossip_modules.mailbox.sealed import Seal, pack
from gossip_modules.membership.background_log import log
from tests.harness.mailbox import MailRun, MailWorker, in_memory, steps
from tests.harness.quadratics import Point, plain_sgd

H, NUM_OUTER, N = 3, 6, 3
KEY = b"key of the job"
METHODS: dict[str, Callable[[], Algorithm]] = {
    "diloco": lambda: DiLoCo(H),
    "sparseloco": lambda: SparseLoCo(H, compressor=TopK(1.0)),
    "noloco": lambda: NoLoCo(H),
}


def trained(worker: MailWorker, algorithm: Algorithm, num_outer: int = NUM_OUTER) -> tuple[Tensor, float]:
    """The model and the number of refused objects of a worker, whose steps take a second."""
    point = Point()
    model = worker.wrap(point, algorithm=algorithm)

    def loss(step: int) -> Tensor:
        worker.clock.sleep(1.0)
        value: Tensor = model(worker.number)
        return value

    steps(worker, plain_sgd(model.parameters()), loss, H * num_outer)
    return point.x.detach().clone(), model.comm_stats()["store_refused"]


class Stranger:
    """Someone with the rights of a worker at the store, old copies of objects, and no key.

    Args:
        run: the run.
        seed: draws the attacks.
    """

    def __init__(self, run: MailRun, seed: int = 0) -> None:
        self.medium: Medium = in_memory(run.name, clock=run.clock, key=b"another key")
        self.draw, self.old = random.Random(seed), dict[str, bytes]()

    def look(self) -> list[str]:
        """The paths of all objects, each of which is kept as it was found first."""
        for path in sorted(self.medium._list("")):
            if path not in self.old and (data := self.medium._get(path, 1 << 30)) is not None:
                self.old[path] = bytes(data)
        return list(self.old)

    def forged(self, path: str) -> bytes:
        """An object for this path that the stranger has made, or altered."""
        data = bytearray(self.old.get(path) or b"")
        kinds: list[bytes] = [
            Seal(None).seal(path, pack({"count": 1, "period": 1e9})),
            self.medium.seal.seal(path, pack({"members": [[0, "0"]], "by": 0, "has_mean": True})),
            b"",
            b"GMMB\x01",
        ]
        if data:
            kinds += [bytes(data[: self.draw.randrange(len(data))]), bytes(data) + b"\0"]
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
            kinds.append(bytes(data))
        return self.draw.choice(kinds)


JUNK = [
    "worker/evil/beat",
    "worker/000077/beat",
    "worker/000077/left/beat",
    "worker/000001/left",
    "worker/0/left",
    "round/0-average/9999999999/close",
    "round/0-average/9999999999/000001",
    "round/0-average/word/close",
    "round/0-average/word/x9",
    "round/0-average/0000000003/x9",
    "round/0-average/0000000003/000077",
    "round/0-mix/9999999999/close",
    "round/0-mix/9999999999/000001",
    "round/0-mix/word/close",
    "round/evil",
    "model/9999999999",
    "model/word",
    "model/9999999999/x",
    "mail/evil/000000/0000000000",
    "evil",
]


@pytest.mark.parametrize("name", METHODS)
def test_objects_beside_those_of_the_run_change_no_bit(name: str) -> None:
    """Forged, moved and replayed objects at any place that no worker writes to."""
    honest = MailRun(key=KEY).train(N, lambda worker: trained(worker, METHODS[name]()))
    run = MailRun(key=KEY)
    stranger = Stranger(run)

    def add() -> None:
        for _ in range(60):
            found = stranger.look()
            for path in JUNK:
                copied = stranger.draw.choice([stranger.old[p] for p in found] or [b""])
                stranger.medium._put(path, stranger.draw.choice([copied, stranger.forged(path)]))
            run.clock.sleep(0.5)

    for _ in range(N):
        run.start(lambda worker: trained(worker, METHODS[name]()), min_workers=N)
    run.clock.start(add, "stranger")
    found = run.end()
    assert [x for x, _ in found] == [x for x, _ in honest]
    assert sum(refused for _, refused in found) > 0
    assert all(refused == 0 for _, refused in honest)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_objects_in_the_place_of_those_of_the_run_are_never_merged(name: str, seed: int) -> None:
    """Whatever lies in the place of messages, closes and means, each round has messages of workers only."""
    run = MailRun(key=KEY, quorum=1)
    stranger = Stranger(run, seed)
    others = MailRun(key=KEY)
    others.train(N, lambda worker: trained(worker, METHODS[name]()))
    foreign = {path: bytes(others.workers[0].medium._get(path, 1 << 30) or b"") for path in others.objects()}
    sent = dict[str, list[bytes]]()  # the contents that workers have created, by path

    def replace() -> None:
        for _ in range(80):
            stranger.look()
            number = max((int(p.split("/")[2]) for p in stranger.old if p.startswith("round/")), default=0)
            kind = "mix" if name == "noloco" else "average"
            for r in (number, number + 1):
                leaf = stranger.draw.choice(["000000", "000001", "000002", "close", "mean"])
                path = f"round/0-{kind}/{r:010d}/{leaf}"
                before = f"round/0-{kind}/{max(r - 1, 0):010d}/{leaf}"
                copies = [foreign.get(path), foreign.get(before), stranger.old.get(before), stranger.forged(path)]
                # A squatted close would end all rounds, so it is written in the place of one that is there.
                if leaf != "close" or path in stranger.old:
                    stranger.medium._put(path, stranger.draw.choice([data for data in copies if data is not None]))
            run.clock.sleep(0.35)

    for _ in range(N):
        worker = run.start(lambda worker: trained(worker, METHODS[name]()), min_workers=N)
        create = worker.medium.inner._create

        def note(path: str, data: bytes, create: Callable[[str, bytes], bool] = create) -> bool:
            sent.setdefault(path, []).append(data[Seal.num_bytes :])
            return create(path, data)

        worker.medium.inner._create = note  # type: ignore[method-assign]
    run.clock.start(replace, "stranger")
    found = run.end()
    assert sum(refused for _, refused in found) > 0
    for path in sent:
        folder, _, leaf = path.rpartition("/")
        for close in [Close.read(0, data) for data in sent[path] if leaf == "close"]:
            for member, digest in zip(close.members, close.digests, strict=True):
                assert digest in [hashlib.sha256(data).hexdigest() for data in sent[f"{folder}/{member:06d}"]], path
    assert torch.stack([x for x, _ in found]).abs().max() < 10.0  # all minima are within 3


def test_the_objects_of_another_run_with_the_same_key_do_not_open() -> None:
    runs = [MailRun(key=KEY), MailRun(key=KEY)]
    for run in runs:
        run.train(N, lambda worker: trained(worker, DiLoCo(H)))
    one, other = (run.workers[0].medium for run in runs)
    for path in runs[0].objects():
        data = one.inner._get(path, 1 << 30)
        assert data is not None
        assert one.seal.open(path, data) is not None
        assert (other.seal.open(path, data) is not None) == (path == "job")


def test_a_worker_with_another_key_is_refused() -> None:
    run = MailRun(key=KEY)
    run.train(1, lambda worker: trained(worker, DiLoCo(H), 1))
    for key in (b"another key", None):
        late = MailRun(key=key, name=run.name)
        with pytest.raises(MailboxError, match=r"has an object 'job' that does not open .*; set GOSSIP_JOB_KEY to it"):
            late.train(1, lambda worker: trained(worker, DiLoCo(H), 1))


def test_a_newcomer_takes_the_newest_model_that_opens() -> None:
    run = MailRun(key=KEY)
    run.train(2, lambda worker: trained(worker, DiLoCo(H)))
    stranger, before = Stranger(run), run.workers[0].drivers[0].memory.vector("phi").parts[0]
    stranger.look()
    stranger.medium._put("model/9999999999", stranger.old["model/0000000003"])
    stranger.medium._put(f"model/{NUM_OUTER + 1:010d}", stranger.forged(f"model/{NUM_OUTER:010d}"))
    again = MailRun(key=KEY, name=run.name)
    ((x, refused),) = again.train(1, lambda worker: trained(worker, DiLoCo(H), NUM_OUTER))
    assert torch.equal(x, before)
    assert refused >= 2


def test_the_command_that_lists_runs_meets_any_name() -> None:
    run = MailRun(key=KEY)
    run.train(2, lambda worker: trained(worker, DiLoCo(H)))
    medium = run.workers[0].medium
    for path in JUNK:
        medium.inner._put(path, b"junk")
    report = report_of(open_medium(f"memory://{run.name}", timeout=1.0, key=b"x"), wait=0.0, show=lambda text: None)
    assert report.models[-1] == 9999999999
    assert {worker.number for worker in report.workers} >= {0, 1}


def test_a_close_that_does_not_open_is_logged_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    run = MailRun(key=KEY)
    Stranger(run).medium._put("round/0-average/0000000001/close", b"?")
    with caplog.at_level(logging.WARNING, logger=log.name):
        found = run.train(2, lambda worker: trained(worker, DiLoCo(H)))
        log.flush(5.0)
    assert all(worker.drivers[0].next == {"average": 1} for worker in run.workers)
    assert not torch.equal(found[0][0], found[1][0]), "each has gone on alone"
    assert caplog.text.count("round 1 of 0-average cannot be closed: its close does not open") == 2


@pytest.mark.parametrize("num_late", [1, 2])
def test_a_close_that_is_deleted_makes_no_second_history(num_late: int, caplog: pytest.LogCaptureFixture) -> None:
    """Worker 2 is late in the outer steps whose closes vanish once the others have read them."""
    lost = [f"round/0-average/{number:010d}/{leaf}" for number in range(1, 1 + num_late) for leaf in ("close", "mean")]

    def body(worker: MailWorker) -> dict[int, float]:
        """The anchor before each round, by the number of the round."""
        point, anchors = Point(), dict[int, float]()
        model = worker.wrap(point, algorithm=DiLoCo(H))

        def loss(step: int) -> Tensor:
            worker.clock.sleep(1.0)
            if worker.number == 0 and step == (1 + num_late) * H + 1:
                worker.medium.delete(lost)
            value: Tensor = model(worker.number)
            anchors[sum(worker.closes().values())] = worker.anchor().item()
            return value

        steps(worker, plain_sgd(model.parameters()), loss, H * (NUM_OUTER + 6))
        return anchors

    run = MailRun({2 + i: [2] for i in range(num_late)}, quorum=2)
    first, *others = run.train(N, body)
    for anchors in others:
        common = sorted(first.keys() & anchors.keys())
        assert common[-1] >= NUM_OUTER + 3
        assert [anchors[number] for number in common] == [first[number] for number in common]
    assert "going on from the newest model" in caplog.text
