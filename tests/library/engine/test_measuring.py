"""overlap="auto": the choice, the bits after it, what a resumed run does, and where it is refused."""

from __future__ import annotations

import copy
import doctest
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules.engine import measuring
from gossip_modules.engine.measuring import NUM_MEASURED, NUM_WARM, OverlapChoice, OverlapLimits
from tests.harness.ranks import run_ranks, solo_group

NUM_ROUNDS = NUM_WARM + NUM_MEASURED
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("limits", "measured", "expected"),
    [
        (OverlapLimits(2, BF16), [(0.1, 0.005), (0.1, 0.005)], (False, 0, None)),  # hides little: exact rounds
        (OverlapLimits(0, BF16), [(0.001, 0.2)] * 2, (False, 0, "bfloat16")),  # a computation that can hide little
        (OverlapLimits(0, None), [(0.001, 0.2)] * 2, (False, 0, None)),
        (OverlapLimits(2, BF16), [(0.001, 0.2)] * 2, (True, 2, "bfloat16")),  # rounds in every third step
        (OverlapLimits(0, BF16, has_wide_messages=False), [(0.001, 0.2)] * 2, (False, 0, None)),
        (OverlapLimits(2, BF16), [(0.1, 0.09)] * 2, (True, 0, None)),
        (OverlapLimits(2, BF16), [(0.05, 0.14), (0.1, 0.09)], (True, 0, None)),  # rank 0 waits for rank 1
        (OverlapLimits(2, BF16), [(0.1, 0.18)] * 2, (True, 0, "bfloat16")),
        (OverlapLimits(2, BF16), [(0.1, 0.38)] * 2, (True, 1, "bfloat16")),
        (OverlapLimits(2), [(0.1, 0.18)] * 2, (True, 1, None)),
        (OverlapLimits(2), [(0.1, 0.9)] * 2, (True, 2, None)),
        (OverlapLimits(), [(0.1, 0.9)] * 2, (True, 0, None)),
    ],
)
def test_the_first_setting_that_hides_a_round_is_chosen(
    limits: OverlapLimits, measured: list[tuple[float, float]], expected: tuple[bool, int, str | None]
) -> None:
    choice = limits.choose(measured)
    assert (choice.overlap, choice.max_staleness, choice.wire_dtype) == expected
    assert choice.step_seconds == max(step for step, _ in measured)


COMPUTE, MODEL = 0.04, 4 * 2.8e6  # seconds of a step, and bytes, of the benchmark of the page on defaults


def predicted(choice: OverlapChoice, left: float) -> float:
    """The seconds of a step by a choice whose rounds take `left` seconds."""
    if not choice.overlap:
        return choice.step_seconds + left
    return max(choice.step_seconds, left / (choice.max_staleness + 1))


@pytest.mark.parametrize("latency", [0.0, 1e-4, 0.02])
@pytest.mark.parametrize("gbits", [0.01, 0.1, 0.3, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("limits", [OverlapLimits(), OverlapLimits(0, BF16), OverlapLimits(3, BF16)], ids=str)
def test_no_other_setting_is_a_tenth_faster(limits: OverlapLimits, gbits: float, latency: float) -> None:
    """All settings within the limits, for links of a speed and a latency; exactness is worth a tenth."""

    def round_seconds(dtype: str | None) -> float:
        return latency + 8 * MODEL / (1 if dtype is None else 2) / (gbits * 1e9)

    cost = round_seconds(None)
    choice = limits.choose([(COMPUTE, cost)] * 8, latency, MODEL)
    assert limits.allow(choice)
    taken = predicted(choice, round_seconds(choice.wire_dtype))
    for overlap in (False, True):
        for staleness in range(limits.max_staleness + 1 if overlap else 1):
            other = OverlapChoice(overlap, staleness, None, COMPUTE, cost)
            assert taken <= predicted(other, cost) / (1 - measuring.WORTHWHILE) + 1e-12
    if limits.wire_dtype is not None and cost > max(COMPUTE, 2 * latency):  # the bytes take most of the time
        assert choice.wire_dtype == "bfloat16"
    assert bool(choice.advice) == (taken > 2 * COMPUTE)


def test_the_advice_names_the_arguments_that_the_network_asks_for() -> None:
    slow = [(0.05, 0.95)] * 8
    advice = OverlapLimits().choose(slow, 1e-4, MODEL).advice
    assert advice == (
        "training waits 95% of the time for the network: wire_dtype=torch.bfloat16 halves the messages, and "
        "algorithm=LocalSGD(sync_every=38), or DiLoCo, waits at most half of it"
    )
    narrow = OverlapLimits(0, BF16).choose(slow, 1e-4, MODEL)
    assert "bfloat16" not in narrow.advice
    assert "training waits 90% of the time for the network: algorithm=LocalSGD(" in str(narrow)
    assert "bfloat16" not in OverlapLimits().choose(slow, 0.9, MODEL).advice  # the latency takes the time
    assert OverlapLimits().choose(slow, 1e-4, 1000).advice == ""  # a model of an example
    assert OverlapLimits(gossip_every=40).choose(slow, 1e-4, MODEL).advice == ""


class Run:
    """A model in training: the losses differ by rank and by step."""

    def __init__(self, group: dist.ProcessGroup, state: dict[str, Any] | None = None, **options: Any) -> None:
        torch.manual_seed(1)
        self.rank, self.num_steps = group.rank(), 0
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.model = gm.GossipDataParallel(module, process_group=group, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if state is not None:
            state = copy.deepcopy(state)  # torch's optimizers keep the tensors that they load
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.num_steps = state["step"]

    def train(self, num_steps: int) -> Run:
        for _ in range(num_steps):
            draw = torch.Generator().manual_seed(100 * self.rank + self.num_steps)
            self.optimizer.zero_grad()
            self.model(torch.randn(3, 4, generator=draw)).square().sum().backward()
            self.optimizer.step()
            self.num_steps += 1
        return self

    def state(self) -> dict[str, Any]:
        """A copy, as a file would hold it."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.num_steps}
        return copy.deepcopy(parts)

    def bits(self) -> list[Tensor]:
        """Of the parameters and buffers, when no round is in flight."""
        self.model.flush()
        return [x.clone() for x in self.model.module.state_dict().values()]


@pytest.mark.parametrize("options", [{}, {"algorithm": gm.Choco(gm.SignNorm(), step_size=0.1), "push_sum": False}])
@pytest.mark.parametrize("chosen", [(False, 0, None), (True, 0, None), (True, 0, "bfloat16")])
def test_after_the_choice_a_run_has_the_bits_of_one_built_with_it(
    chosen: tuple[bool, int, str | None], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if chosen[2] and options:
        options = {"algorithm": None}  # Choco makes its own messages
    monkeypatch.setattr(OverlapLimits, "choose", lambda *_: OverlapChoice(*chosen, 0.1, 0.2))
    wire = {} if chosen[2] is None else {"wire_dtype": getattr(torch, chosen[2])}

    def body(group: dist.ProcessGroup) -> list[list[Tensor]]:
        own = {**options, **({"wire_dtype": "auto"} if wire else {})}
        auto = Run(group, overlap="auto", **own).train(NUM_ROUNDS - 1)
        before = auto.state()
        assert (auto.model.overlap, auto.model.overlap_choice) == ("auto", None)
        auto.train(1)
        assert auto.model.overlap is chosen[0]
        assert auto.model.comm_stats()["auto_round_seconds"] == 0.2
        state = auto.state()
        built = Run(group, state, overlap=chosen[0], **{**options, **wire})
        resumed = Run(group, state, overlap="auto", **own)
        assert resumed.model.overlap_choice == auto.model.overlap_choice
        early = Run(group, before, overlap="auto", **own)
        assert early.model.overlap_choice is None
        return [run.train(4).bits() for run in (auto, built, resumed)]

    for auto, built, resumed in run_ranks(2, body):
        assert all(map(torch.equal, auto, built))
        assert all(map(torch.equal, auto, resumed))


@pytest.mark.parametrize(
    ("chosen", "options"),
    [((True, 2, None), {"max_staleness": 1}), ((True, 0, "bfloat16"), {})],
)
def test_a_choice_beyond_the_limits_of_a_resumed_run_is_made_anew(
    chosen: tuple[bool, int, str | None], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OverlapLimits, "choose", lambda *_: OverlapChoice(*chosen, 0.1, 0.2))

    def body(group: dist.ProcessGroup) -> None:
        state = Run(group, overlap="auto", max_staleness=2, wire_dtype="auto").train(NUM_ROUNDS).state()
        resumed = Run(group, state, overlap="auto", **options)
        assert resumed.model.overlap_choice is None
        resumed.train(2).model.close()

    run_ranks(2, body)


def test_all_ranks_measure_and_choose_alike_and_one_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gossip_modules.overlap")

    def body(group: dist.ProcessGroup) -> tuple[OverlapChoice | None, bool, OverlapChoice | None]:
        run = Run(group, overlap="auto", max_staleness=1, wire_dtype="auto").train(NUM_ROUNDS + 2)
        twin = copy.deepcopy(run.model)
        return run.model.overlap_choice, math.isfinite(sum(x.sum() for x in run.bits())), twin.overlap_choice

    results = run_ranks(3, body)
    assert len(set(results)) == 1
    choice, is_finite, twin = results[0]
    assert is_finite
    assert choice is not None
    assert choice == twin
    assert choice.step_seconds > 0
    assert [record.getMessage() for record in caplog.records] == [f'overlap="auto": {choice}, after round 7']


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"overlap": "always"}, "got overlap='always', expected True or False, or 'auto'"),
        (
            {"overlap": False, "wire_dtype": "auto"},
            "got wire_dtype='auto' with overlap=False, expected overlap='auto', which measures",
        ),
        ({"algorithm": gm.D2()}, r"got overlap='auto' with D2\(.*\), expected overlap=False: it needs the result"),
        ({"algorithm": gm.DiLoCo(4)}, r"got overlap='auto' with DiLoCo\(.*pass delay='auto' to the algorithm"),
        ({"algorithm": gm.NoLoCo(4)}, r"got overlap='auto' with NoLoCo\(.*pass delay=1, for example, to the algorithm"),
        ({"algorithm": gm.EagerDiLoCo(4)}, r"got overlap='auto' with EagerDiLoCo\(.*; leave overlap out$"),
        (
            {"algorithm": gm.Choco(gm.SignNorm(), step_size=0.4), "push_sum": False, "wire_dtype": "auto"},
            "got wire_dtype=torch.bfloat16 with Choco",
        ),
        ({"membership": "host:1"}, "got overlap='auto' with a membership, expected True or False: a worker that joins"),
    ],
)
def test_methods_that_cannot_choose_are_refused_with_a_remedy(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        gm.GossipDataParallel(nn.Linear(2, 2), process_group=solo_group(), **{"overlap": "auto", **options})


def test_the_averages_that_training_begins_with_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OverlapLimits, "choose", lambda *_: OverlapChoice(True, 0, None, 0.1, 0.2))

    def body(group: dist.ProcessGroup) -> list[bool]:
        run, found = Run(group, overlap="auto", schedule=gm.Schedule(average_until=3)), []
        for _ in range(NUM_ROUNDS + 4):
            run.train(1)
            found.append(run.model.overlap_choice is None)
        return found

    # The forwards of steps 0 to 3 average.
    assert run_ranks(2, body) == [[True] * (NUM_ROUNDS + 3) + [False]] * 2


def test_a_rank_alone_has_nothing_to_hide() -> None:
    choice = Run(solo_group(), overlap="auto").train(NUM_ROUNDS + 1).model.overlap_choice
    assert choice is not None
    assert not choice.overlap


def test_advice_is_a_warning_of_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python shows it without any setting of its loggers."""
    choice = OverlapChoice(False, 0, None, 0.1, 0.2, advice="take local SGD")
    monkeypatch.setattr(OverlapLimits, "choose", lambda *_: choice)
    Run(solo_group(), overlap="auto").train(NUM_ROUNDS + 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        'overlap="auto": overlap=False (a step takes 100 ms, a round 200 ms); take local SGD, after round 7'
    )


def test_the_example_runs() -> None:
    assert doctest.testmod(measuring).failed == 0
