"""Training in the Lab is training by ranks, for each method of the registry whose ranks take all steps together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import GroupAverageDataParallel, LocalSGD, MixedMomentum, SlowMo
from gossip_modules.compression import Absmax
from gossip_modules.dpwa import ClockInterpolation, ConstantInterpolation, LossInterpolation
from gossip_modules.engine.overlap import Overlap
from gossip_modules.extend import Memory, Mix, Round, Vectors
from gossip_modules.graph_manager import NetworkXGraph
from gossip_modules.lab import Compute, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.asynchronous import Pull
from gossip_modules.lab.clock import WorkerLinks
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.lab.plan import _RUNS
from gossip_modules.matcha import __main__ as matcha
from gossip_modules.methods import METHODS, wrapping
from gossip_modules.methods.built_in import Dpwa
from gossip_modules.methods.chosen import Chosen, read_algorithm
from gossip_modules.methods.options import Context, WrapperOptions
from gossip_modules.mixing_manager import MatrixMixing
from gossip_modules.rounds.algorithm import Algorithm
from gossip_modules.schedule import Action, Schedule
from gossip_modules.wrappers import gossip
from tests.harness.ranks import run_ranks

N, STEPS, PERIOD = 5, 7, 3
# With five ranks and large steps all entries are visible, of which PULSELoCo warns.
pytestmark = pytest.mark.filterwarnings(r"ignore:PULSELoCo\(.*each rank has sent .* an all-reduce of all entries sends")
LOCKSTEP = [name for name, method in METHODS.items() if method.pace == "lockstep"]


class Net(nn.Module):
    """Two layers of 512 parameters in all, which fragments of two or four cut at multiples of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.roll(1, 1)).square().mean()


def task(momentum: float) -> LabTask:
    return LabTask(
        lambda: Net().double(),
        loss,
        lambda worker, step, generator: torch.randn(4, 16, generator=generator, dtype=torch.float64) + worker / N,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum),
    )


def chosen(name: str, **settings: Any) -> Chosen:
    """The recipe, with few steps between rounds, and with these settings of the algorithm."""
    found = read_algorithm(name, seed=0)
    period = found.method.period
    settings |= {period: PERIOD} if period else {}
    return replace(found, made=replace(found.made, **settings)) if settings else found


class Trained(NamedTuple):
    """The models and the first moments of all ranks, [n, d], and the mean of the bytes that a rank has sent."""

    x: Tensor
    moments: Tensor
    sent_bytes: float


def by_ranks(
    found: Chosen,
    own: LabTask,
    start: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_ranks: int = N,
    **options: Any,
) -> Trained:
    """Train ranks in threads by the method, with these options of the wrapper."""
    this = threading.local()

    def in_group(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, **arguments: wrapper(module, process_group=this.group, **{**arguments, **options})

    for wrapper in ("AllReduceDataParallel", "GossipDataParallel"):
        monkeypatch.setattr(wrapping, wrapper, in_group(getattr(wrapping, wrapper)))

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, float]:
        this.group = group
        module = own.model()
        module.load_state_dict(start)
        context = Context(group.rank(), num_ranks, seed=0, timeout=timedelta(minutes=1))
        model: Any = found.method.wrap(module, found, WrapperOptions(), context)
        assert own.optimizer is not None
        optimizer = own.optimizer(list(model.parameters()))
        for momentum in momenta_of(module):
            momentum.of(optimizer)
        before = model.comm_stats()["bytes_sent"]
        for step in range(STEPS):
            optimizer.zero_grad()
            own.loss(model, own.batch(group.rank(), step, 0)).backward()
            optimizer.step()
        model(own.batch(group.rank(), STEPS, 0))
        model.settle()
        sent = model.comm_stats()["bytes_sent"] - before
        model.close()
        moments = [x.flatten() for momentum in momenta_of(module) for x in momentum.buffers()]
        none = torch.empty(0, dtype=torch.float64)
        return torch.cat([p.detach().flatten() for p in module.parameters()]), torch.cat([none, *moments]), sent

    x, moments, sent = zip(*run_ranks(num_ranks, body), strict=True)
    return Trained(torch.stack(x), torch.stack(moments), sum(sent) / num_ranks)


def momenta_of(module: nn.Module) -> list[MixedMomentum]:
    return [part for part in module.modules() if isinstance(part, MixedMomentum)]


@pytest.mark.parametrize("name", LOCKSTEP)
def test_a_method_trains_as_by_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, so that rounding crosses no threshold of a code."""
    check_as_by_ranks(name, chosen(name), monkeypatch)


def takes_delay(name: str) -> bool:
    """Whether rounds of the recipe may end steps after they began."""
    made = read_algorithm(name, seed=0).made
    return isinstance(made, Algorithm) and any(field.name == "delay" and field.init for field in fields(made))


CODED: dict[str, Any] = {"compressor": Absmax(4, 8), "collective": "all_reduce", "momentum": 0.0, "lr": 1.0}
"""Settings of an outer method whose average has a code of few bits."""


@pytest.mark.parametrize("settings", [CODED, {**CODED, "delay": 1}, {**CODED, "fragments": 2}])
def test_an_average_of_codes_is_that_of_ranks(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_as_by_ranks("diloco", chosen("diloco", **settings), monkeypatch)


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("name", [*filter(takes_delay, LOCKSTEP)])
def test_a_method_with_a_delay_trains_as_by_ranks(name: str, delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_as_by_ranks(name, chosen(name, delay=delay), monkeypatch)


def check_as_by_ranks(name: str, found: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    own = task(0.9 if METHODS[name].needs_sgd else 0.0)
    plan = replace(LabPlan.of(name), chosen=found, is_text=False)
    training = LabTraining(plan, Setting(N, None, Compute(0.1), Network("1 Gbit/s"), seed=0), own)
    begin = {n.removeprefix("model."): p.detach().clone() for n, p in training.models.module.named_parameters()}
    for _ in training.run(STEPS):
        pass
    assert float(training.models.x[0].std()) > 0.01
    moved = torch.cat([p.flatten() for p in begin.values()])
    z = training.settle()
    assert float((z - moved).norm(dim=1).min()) > 0.01, "nothing was learnt"
    names = [n.removeprefix("model.") for n in training.models.names]
    assert names == list(begin), "the order of the flat vector"
    torch.testing.assert_close(z, by_ranks(found, own, begin, monkeypatch).x, rtol=0, atol=1e-6)


@dataclass(frozen=True)
class Weighted(Algorithm):
    """D-PSGD with a matrix of its own, and no default graph."""

    def default_mixing(self, world_size: int) -> MatrixMixing:
        graph = NetworkXGraph(nx.path_graph(world_size))
        laplacian = torch.from_numpy(nx.laplacian_matrix(nx.path_graph(world_size)).toarray()).double()
        return MatrixMixing(graph, torch.eye(world_size, dtype=torch.float64) - 0.3 * laplacian)

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        yield Mix(v.x)


def test_an_algorithm_has_its_own_weights_as_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    own, plan, n = task(0.0), LabPlan.of(Weighted()), 4  # whose default graph is no ring
    training = LabTraining(plan, Setting(n, None, Compute(0.1), Network("1 Gbit/s"), seed=0), own)
    begin = {name.removeprefix("model."): p.detach().clone() for name, p in training.models.module.named_parameters()}
    for _ in training.run(STEPS):
        pass
    found = by_ranks(plan.chosen, own, begin, monkeypatch, num_ranks=n)
    torch.testing.assert_close(training.settle(), found.x, rtol=0, atol=1e-9)


# Mixed moments.


def with_moments() -> nn.Module:
    module = Net().double()
    MixedMomentum(module)
    return module


REFUSED = {
    **dict.fromkeys(("qgdsgdm", "decentlam"), "its rounds compute the momentum of SGD"),
    **dict.fromkeys(("streamingdiloco", "relaysgd"), "without fragments or trees"),
    **dict.fromkeys(sorted(set(METHODS) - set(LOCKSTEP)), "expected a method whose workers step together"),
}
EXACT: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in LOCKSTEP if name not in REFUSED]
ROUNDED: list[tuple[str, dict[str, Any]]] = [
    (name, {"wire_dtype": dtype})
    for name in ("dpsgd", "sgp", "osgp", "matcha")
    for dtype in (torch.bfloat16, torch.float16, torch.int8)
]


LATE: list[tuple[str, dict[str, Any]]] = [
    *((name, {"delay": delay}) for name in LOCKSTEP if name not in REFUSED and takes_delay(name) for delay in (1, 2)),
    ("noloco", {"delay": 1, "own_weight": 0.25}),
    ("diloco", {"delay": 2, "arrival": "carry"}),
    ("diloco", {"delay": 1, "arrival": "adaptive"}),
    ("diloco", {**CODED, "delay": 2, "arrival": "carry"}),
]


@pytest.mark.parametrize("schedule", [Schedule(average_every=4), Schedule(average_until=2)], ids=["every", "until"])
@pytest.mark.parametrize(
    ("name", "settings"), [("localsgd", {"delay": 2}), ("diloco", {"delay": 1, "arrival": "carry"})]
)
def test_moments_of_an_exact_average_arrive_at_once_as_by_ranks(
    name: str, settings: dict[str, Any], schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_moments(name, chosen(name, **settings), monkeypatch, schedule=schedule)


@pytest.mark.parametrize(("name", "settings"), LATE)
def test_moments_arrive_with_a_delay_as_by_ranks(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_numbers = settings.get("arrival") == "adaptive"  # the norms and cosines of drifts, which the Lab does not count
    check_moments(name, chosen(name, **settings), monkeypatch, uncounted=64 if has_numbers else 0)


@pytest.mark.parametrize(("name", "options"), [*EXACT, *ROUNDED, ("diloco", CODED)])
def test_moments_are_mixed_and_bytes_are_counted_as_by_ranks(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_coded = options is CODED
    check_moments(name, chosen(name, **(options if is_coded else {})), monkeypatch, **({} if is_coded else options))


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("schedule", [Schedule(), Schedule(average_every=4)], ids=["gossip", "exact averages too"])
def test_moments_arrive_with_the_staleness_of_ranks(
    max_staleness: int, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks apply a late round as soon as it is complete; here they wait until its last step, as the Lab does."""
    monkeypatch.setattr(gossip, "Overlap", lambda **given: Overlap(**{**given, "is_eager": False}))
    check_moments("osgp", chosen("osgp"), monkeypatch, max_staleness=max_staleness, schedule=schedule)


def check_moments(
    name: str, recipe: Chosen, monkeypatch: pytest.MonkeyPatch, *, uncounted: int = 0, **options: Any
) -> None:
    own = replace(task(0.9), model=with_moments)
    plan = replace(LabPlan.of(name, **options), chosen=recipe, is_text=False)
    training = LabTraining(plan, Setting(N, None, Compute(0.1), Network("1 Gbit/s"), seed=0), own)
    begin = {n.removeprefix("model."): p.detach().clone() for n, p in training.models.module.named_parameters()}
    for _ in training.run(STEPS):
        pass
    z, found = training.settle(), by_ranks(recipe, own, begin, monkeypatch, **options)
    moments = torch.cat([training.models.buffers[name].flatten(1) for name in training.models.mixed], 1)
    assert moments.shape == found.moments.shape
    assert float(moments.std()) > 1e-3
    torch.testing.assert_close(z, found.x, rtol=0, atol=1e-6)
    torch.testing.assert_close(moments, found.moments, rtol=0, atol=1e-6)
    # A rank of all-reduce averages once more, in the forward after the last step; in the Lab it does not.
    sent = (found.sent_bytes - uncounted) * (STEPS / (STEPS + 1) if name == "ar" else 1)
    padded = 2 * 64 if options.get("wire_dtype") is torch.int8 else 0  # ends of parameters and moments in a message
    share = padded / (found.x[0].numel() + found.moments[0].numel())
    assert training.sent_bytes == pytest.approx(sent, rel=1e-4 + share), "the Lab does not round bytes of all-reduce"


@pytest.mark.parametrize("name", REFUSED)
def test_the_lab_refuses_methods_whose_moments_it_would_mix_in_another_way(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        LabTraining(
            LabPlan.of(name),
            Setting(4, None, Compute(0.1), Network("1 Gbit/s"), seed=0),
            replace(task(0.9), model=with_moments),
        )


@pytest.mark.parametrize("name", ["qgdsgdm", "decentlam"])
def test_ranks_refuse_algorithms_that_compute_the_momentum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(task(0.9), model=with_moments)
    with pytest.raises(ValueError, match=REFUSED[name]):
        by_ranks(chosen(name), own, own.model().state_dict(), monkeypatch)


def test_methods_at_their_own_pace_are_those_whose_rounds_depend_on_time() -> None:
    assert sorted(set(METHODS) - set(LOCKSTEP)) == ["a2cid2", "adpsgd", "dpwa", "wagma"]


@pytest.mark.parametrize("name", ["streamingdiloco", "relaysgd"])
def test_the_lab_warns_where_running_statistics_make_other_models(name: str) -> None:
    with_statistics = replace(task(0.9), model=lambda: nn.Sequential(Net().double(), nn.BatchNorm1d(16).double()))
    with pytest.warns(UserWarning, match="got a model with running statistics and .* ranks get other models"):
        LabTraining(LabPlan.of(name), Setting(4, None, Compute(0.1), Network("1 Gbit/s"), seed=0), with_statistics)


def test_an_algorithm_without_a_graph_has_the_weights_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """SlowMo sends push-sum weights, so its default graph is directed."""
    own, plan = task(0.0), LabPlan.of(SlowMo(sync_every=2, gossip_every=1))
    training = LabTraining(plan, Setting(N, None, Compute(0.1), Network("1 Gbit/s"), seed=0), own)
    begin = {name.removeprefix("model."): p.detach().clone() for name, p in training.models.module.named_parameters()}
    for _ in training.run(STEPS):
        pass
    found = by_ranks(plan.chosen, own, begin, monkeypatch)
    torch.testing.assert_close(training.settle(), found.x, rtol=0, atol=1e-9)


# Plans.


@pytest.mark.parametrize("name", ["ar", "adpsgd", "wagma", "dpwa", "choco", "diloco"])
def test_a_staleness_is_refused_where_the_lab_does_not_know_it(name: str) -> None:
    setting = Setting(4, None, Compute(0.1), Network("1 Gbit/s"), seed=0)
    with pytest.raises(ValueError, match=f"got max_staleness=2 of {name} in the Lab, expected 0"):
        LabTraining(LabPlan.of(name, max_staleness=2), setting, task(0.0))
    for plan, error in (
        (LabPlan.of("sgp", max_staleness=2), "got max_staleness=2 with overlap=False"),
        (LabPlan.of("osgp", overlap="auto"), "got overlap='auto' in the Lab"),
    ):
        with pytest.raises(ValueError, match=error):
            LabTraining(plan, setting, task(0.0))


def test_plans_that_train_in_other_ways_have_other_texts() -> None:
    others: list[dict[str, Any]] = [{}, {"overlap": True}, {"max_staleness": 1}, {"wire_dtype": torch.bfloat16}]
    plans = [LabPlan.of("osgp", **given) for given in others]
    assert len({plan.setting for plan in plans}) == len(plans)
    assert [plan.label for plan in plans] == ["osgp", "osgp", "osgp late by 1", "osgp+bfloat16"]
    assert [plan.interval for plan in plans] == [1, 1, 2, 1]


# WAGMA-SGD with late ranks.

FIRST = {1: 0, 2: 3, 3: 3, 5: 2, 6: 1, 7: 2}
"""By the number of the forward, the one of four ranks that comes in time. All come to the others, 0 and 4, together."""


class AllLateButOne(Compute):
    """All ranks but one come half a step late to each forward of FIRST."""

    def compute_seconds(self, step: int, workers: np.ndarray) -> np.ndarray:
        """See `Compute`."""
        now, then = (np.array([rank != FIRST.get(k, rank) for rank in workers]) / 2 for k in (step, step + 1))
        seconds: np.ndarray = super().compute_seconds(step, workers) + then - now
        return seconds


def test_late_ranks_of_wagma_train_as_late_workers_of_the_lab() -> None:
    """A late rank takes every step: it merges the average that its group has made without it."""
    n, steps, own, here = 4, max(FIRST), task(0.0), threading.Barrier(4)
    plan, links = LabPlan.of("WAGMA(sync_period=5)"), Network("1000 Gbit/s, 0.001 ms")
    training = LabTraining(plan, Setting(n, None, AllLateButOne(1.0), links), own)
    begin = {name.removeprefix("model."): p.detach().clone() for name, p in training.models.module.named_parameters()}
    *_, z = training.run(steps)
    assert training.num_steps.tolist() == [steps] * n

    def body(group: dist.ProcessGroup) -> tuple[Tensor, int]:
        module = own.model()
        module.load_state_dict(begin)
        model: Any = GroupAverageDataParallel(module, sync_period=5, process_group=group)
        assert own.optimizer is not None
        optimizer = own.optimizer(list(model.parameters()))
        for step in range(steps + 1):
            if group.rank() != FIRST.get(step, group.rank()):
                worker = model._local.engine.worker
                with worker.state:
                    worker.wait(lambda: worker.num_done > step)  # noqa: B023 (called here)
            optimizer.zero_grad()
            own.loss(model, own.batch(group.rank(), step, 0)).backward()
            here.wait(60)
            if step < steps:
                optimizer.step()
        x = torch.cat([p.detach().flatten() for p in module.parameters()])
        model.close()
        return x, model.round

    ends = run_ranks(n, body)
    assert [rounds for _, rounds in ends] == [steps + 1] * n, "a late rank skips none"
    torch.testing.assert_close(z, torch.stack([x for x, _ in ends]), rtol=0, atol=1e-12)
    assert float((z - z.mean(0)).norm()) > 0.01, "late ranks have models of their own"


def test_the_lab_has_the_groups_that_wagma_asks_for() -> None:
    setting = Setting(8, None, Compute(1.0), Network("1 Gbit/s"))
    for text, size in (("WAGMA()", 4), ("WAGMA(group_size=2)", 2), ("WAGMA(group_size=8)", 8)):
        driver: Any = LabTraining(LabPlan.of(text), setting, task(0.0)).method.driver
        assert driver.groups.group_size == size
    for text in ("WAGMA(group_size=1)", "WAGMA(wait_avoiding=False)"):
        with pytest.raises(ValueError, match=r"in the Lab, expected groups .*take LocalSGD\(sync_every=10\)"):
            LabTraining(LabPlan.of(text), setting, task(0.0))


# Settings of methods at their own pace, and of MATCHA: none is ignored.

OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "matcha": {"budget": 0.25, "plan": "plan.json"},
    "wagma": {"group_size": 2, "sync_period": 3, "wait_avoiding": False},
    "dpwa": {
        "interpolation": ConstantInterpolation(0.25),
        "divergence_threshold": 0.5,
        "fetch_probability": 0.5,
    },
}
"""A value of each setting that is not the default."""
REFUSED_SETTINGS = {"wait_avoiding", "divergence_threshold"}


def ends_in_the_lab(made: Any) -> Tensor:
    """The models of 8 workers of unequal speeds after 12 steps."""
    compute = Compute(0.1, speeds=(1.0, 0.6, 1.0, 0.8, 1.0, 1.0, 0.5, 1.0))
    return [*LabTraining(LabPlan.of(made), Setting(8, None, compute, Network("1 Gbit/s")), task(0.0)).run(12)][-1]


@pytest.mark.parametrize("name", sorted(_RUNS))
def test_each_setting_of_a_method_takes_effect_or_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "matcha":
        matcha.main(["--graph", "0", "--budget", "0.3", "--num-budgets", "0", "--output", "plan.json"])
    made = METHODS[name].make
    others = OTHER_SETTINGS.get(name, {})
    assert {field.name for field in fields(made)} == set(others), "a new setting needs a value here"
    plain = ends_in_the_lab(made())
    for setting, value in others.items():
        if setting in REFUSED_SETTINGS:
            with pytest.raises(ValueError, match=rf"{setting}={value}.* in the Lab, expected .* take "):
                ends_in_the_lab(made(**{setting: value}))
        else:
            assert not torch.equal(ends_in_the_lab(made(**{setting: value})), plain), setting


def test_dpwa_of_the_lab_merges_by_its_interpolation() -> None:
    assert torch.equal(ends_in_the_lab(Dpwa(ConstantInterpolation(0.5))), ends_in_the_lab(Dpwa()))
    alone = ends_in_the_lab(Dpwa(fetch_probability=0.0))
    assert torch.equal(ends_in_the_lab(Dpwa(ConstantInterpolation(0.0))), alone)
    by_clock = ends_in_the_lab(Dpwa(ClockInterpolation()))
    assert not torch.equal(by_clock, ends_in_the_lab(Dpwa()))
    for made in (Dpwa(LossInterpolation()), Dpwa(divergence_threshold=0.1)):
        with pytest.raises(ValueError, match=r"Dpwa\(.*\) in the Lab, expected an interpolation without losses"):
            ends_in_the_lab(made)


def test_a_merge_of_the_lab_takes_the_share_of_the_clocks() -> None:
    """Two workers: x <- x + f (x_peer - x), f of the clocks that the two models had."""
    seen: list[tuple[float, float]] = []

    def factor(own: float, peer: float) -> float:
        seen.append((own, peer))
        return 0.25

    links = WorkerLinks(Network("1000 Gbit/s, 0.001 ms"), np.arange(2))
    pull = Pull(Compute(1.0), links, links.plain_message(8.0), factor=factor)
    x = torch.tensor([[0.0], [8.0]])
    found = [x.flatten().tolist()]
    for k in range(6):  # a step takes a little longer than a tick, by the time of the merge
        pull.step(x, k, Action.GOSSIP)
        pull.advance(())
        found += [x.flatten().tolist()] if x.flatten().tolist() != found[-1] else []
    assert found[:3] == [[0.0, 8.0], [2.0, 6.0], [3.0, 5.0]]
    assert seen[:4] == [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (2.0, 2.0)], "a clock counts publications"


# Time.


def starts_of(plan: LabPlan, num_steps: int) -> list[float]:
    """The time at which each step starts; a step computes 0.1 s, and an exact average takes 5 s."""
    setting = Setting(4, 100_000_000, Compute(0.1), Network("1 Gbit/s"), seed=0)
    training = LabTraining(plan, setting, task(0.0))
    return [training.seconds for _ in training.run(num_steps)]


def test_training_waits_for_exact_averages_beside_a_delay() -> None:
    schedule = Schedule(average_until=4)
    late, now = (starts_of(LabPlan.of(LocalSGD(10, delay=d), schedule=schedule), 5) for d in (5, 0))
    assert late[:5] == pytest.approx(now[:5])
    assert now[4] > 20.0
    assert [late[5], now[5]] == pytest.approx([now[4] + 0.1] * 2)


def test_a_late_round_ends_before_the_next_one_begins() -> None:
    schedule = Schedule(average_until=4)
    late, soon = (starts_of(LabPlan.of("osgp", max_staleness=s, schedule=schedule), 5) for s in (3, 0))
    assert late[:5] == pytest.approx(soon[:5])
    assert late[5] < late[4] + 1.0 < soon[5]
