"""Training in the Lab is training by ranks: models, buffers and bytes, by vmap or a loop, with deaths and joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules.algorithms.choco import Choco, LinkChoco
from gossip_modules.algorithms.d2 import D2
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.algorithms.diloco import DiLoCo
from gossip_modules.algorithms.power_gossip import PowerGossip
from gossip_modules.lab import Compute, Join, Kill, LabTask, Mailbox, Network, Result, Setting, compare, models
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.lab.plan import LabPlan
from gossip_modules.rounds.algorithm import Algorithm
from gossip_modules.rounds.stacked import Stacked
from gossip_modules.wrappers.choices import written
from tests.harness.ranks import run_ranks
from tests.library.rounds.test_stacked import graph_for, momentum_of, one_of_each

N, STEPS = 4, 7


class Net(nn.Module):
    """Two layers, with batch normalisation between them if `has_norm`, dropout, or a branch that depends on data."""

    def __init__(self, *, has_norm: bool = False, dropout: float = 0.0, has_branch: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16, bias=not has_norm), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if has_norm else nn.Identity()
        self.dropout, self.has_branch = nn.Dropout(dropout), has_branch

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.first(x)).tanh())
        if self.has_branch and hidden.sum() > 0:
            hidden = hidden.relu()
        return self.last(hidden)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def data(worker: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    return x, (x[:, :4] + worker / N).argmax(1)


def sgd(momentum: float = 0.0) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def task(optimizer: Any = adam, **net: Any) -> LabTask:
    return LabTask(lambda: Net(**net).double(), loss, data, optimizer)


def trained(what: Any, task: LabTask, *, steps: int = STEPS, by: str = "", seed: int = 0, **others: Any) -> LabTraining:
    setting = Setting(N, None, Compute(0.1), Network("1 Gbit/s"), seed=seed)
    training = LabTraining(LabPlan.of(what), setting, task, by=by, **others)
    for _ in training.run(steps):
        pass
    return training


def by_ranks(
    task: LabTask, *, rounds: str = "forward", **arguments: Any
) -> tuple[Tensor, list[dict[str, Tensor]], float]:
    """The models [n, d] and the buffers of ranks in threads, and the bytes that a rank has sent."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, dict[str, Tensor], float]:
        with torch.random.fork_rng(devices=[]):  # of this thread
            torch.manual_seed(0)
            module = task.model()
        module.load_state_dict(start)
        model: Any = gm.GossipDataParallel(module, process_group=group, rounds=rounds, **arguments)
        assert task.optimizer is not None
        optimizer = task.optimizer(list(model.parameters()))
        before = model.comm_stats()["bytes_sent"]
        for step in range(STEPS):
            if rounds == "manual":
                model.gossip_step()
            optimizer.zero_grad()
            task.loss(model, task.batch(group.rank(), step, 0)).backward()
            optimizer.step()
        if rounds == "manual":
            model.gossip_step()
        else:
            model(task.batch(group.rank(), STEPS, 0)[0])
        model.settle()
        sent = model.comm_stats()["bytes_sent"] - before
        model.close()
        parameters = dict(module.named_parameters())
        flat = torch.cat([parameters[name.removeprefix("model.")].detach().flatten() for name in names])
        return flat, {name: b.clone() for name, b in module.named_buffers()}, sent

    names = trained("sgp", task, steps=0).models.names
    torch.manual_seed(0)
    start = task.model().state_dict()
    found = run_ranks(N, body)
    sent = sum(each[2] for each in found) / N
    return torch.stack([each[0] for each in found]), [each[1] for each in found], sent


KINDS = (DPSGD, D2, Choco, LinkChoco, PowerGossip, DiLoCo)
"""One of each kind of rounds: `test_ranks.py` has all recipes, and `test_stacked.py` all algorithms and codes."""


@pytest.mark.parametrize("algorithm", [each for each in one_of_each() if type(each) in KINDS], ids=written)
def test_every_kind_of_algorithm_trains_as_by_ranks(algorithm: Algorithm) -> None:
    """In float64, so that rounding crosses no threshold of a code."""
    own = task(sgd(momentum_of(algorithm)))
    graph: Any = {"graph": gm.RingGraph(N, peers_per_itr=2)} if graph_for(algorithm) else {}
    real, _, sent = by_ranks(own, algorithm=algorithm, push_sum=False, **graph)
    training = trained(LabPlan.of(algorithm, **graph), own)
    z = training.settle()
    torch.testing.assert_close(z, real, rtol=0, atol=1e-6, msg=lambda text: f"{algorithm}: {text}")
    assert training.sent_bytes == pytest.approx(sent, rel=0.05), algorithm


def test_fused_optimizers_are_refused() -> None:
    """Torch's fused SGD on the CPU takes a parameter for contiguous: models of other workers would change."""
    with pytest.raises(ValueError, match="expected fused=False"):
        trained("sgp", task(lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True)), steps=0)


def test_bytes_of_messages_that_take_turns() -> None:
    def draw(worker: int, step: int, generator: torch.Generator) -> Tensor:
        return torch.randn(2, 64, generator=generator)

    tall = LabTask(lambda: nn.Linear(64, 4), lambda model, x: model(x).square().mean(), draw, sgd())
    training = trained("PowerGossip():ring", tall)
    driver = training.method.driver
    assert isinstance(driver, Stacked)
    assert training.sent_bytes == driver.sent_bytes == 8 * 2 * ((4 + 64) / 2 + 4 + 2) * 4


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("sgp", {}),
        ("dpsgd:ring", {"push_sum": False, "graph": gm.RingGraph(N, peers_per_itr=2)}),
    ],
)
def test_models_with_buffers_train_by_adam_as_by_ranks(what: str, arguments: dict[str, Any]) -> None:
    own = task(has_norm=True)
    real, buffers, _ = by_ranks(own, rounds="manual", **arguments)
    training = trained(what, own)
    assert training.models.by == "vmap"
    torch.testing.assert_close(training.settle(), real, rtol=0, atol=1e-6)
    for name, rows in training.models.buffers.items():
        torch.testing.assert_close(rows[1], buffers[1][name.removeprefix("model.")], rtol=0, atol=1e-6)


@pytest.mark.parametrize("what", ["sgp", "DiLoCo(4)", "choco:ring:sign", "adpsgd"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_vmap_is_the_loop(what: str, has_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip_modules.lab.models.CHUNK", 3)  # of four workers
    at_once, one_by_one = (trained(what, task(has_norm=has_norm), by=by) for by in ("vmap", "loop"))
    torch.testing.assert_close(at_once.models.x, one_by_one.models.x, rtol=0, atol=1e-9)
    torch.testing.assert_close(at_once.models.buffers, one_by_one.models.buffers, rtol=0, atol=1e-9)


def test_a_compiled_step_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with batch normalisation, and parameters that its loss does not use, which AdamW would decay.

    The backend writes no C++, which would take a minute.
    """
    by_aot = torch.compile(models._gradients, backend="aot_eager", dynamic=False)
    monkeypatch.setattr(models, "_compiled", lambda: by_aot)

    class Unused(Net):
        def __init__(self) -> None:
            super().__init__(has_norm=True)
            self.unused = nn.Linear(3, 3)

    def own() -> LabTask:
        return LabTask(lambda: Unused().double(), loss, data, adam)

    compiled, one_by_one = (trained("sgp", own(), by=by) for by in ("compile", "loop"))
    assert compiled.models.by == "compile"
    torch.testing.assert_close(compiled.models.x, one_by_one.models.x, rtol=0, atol=1e-9)
    torch.testing.assert_close(compiled.models.buffers, one_by_one.models.buffers, rtol=0, atol=1e-9)


def test_workers_of_a_mailbox_are_not_compiled() -> None:
    with pytest.raises(ValueError, match=r"got by='compile' with world=Mailbox.*expected one of them"):
        compare(
            {"DiLoCo": DiLoCo(4)},
            model=Net,
            loss=loss,
            data=data,
            optimizer=adam,
            workers=[2],
            steps=4,
            world=Mailbox(),
            by="compile",
        )


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("what", ["sgp", "osgp"])
def test_rounded_messages_train_as_by_ranks(what: str, wire_dtype: torch.dtype) -> None:
    own = LabTask(Net, loss, lambda *args: (data(*args)[0].float(), data(*args)[1]), adam)
    overlap = {"overlap": True} if what == "osgp" else {}
    real, _, sent = by_ranks(own, rounds="manual", wire_dtype=wire_dtype, **overlap)
    training = trained(LabPlan.of(what, wire_dtype=wire_dtype), own)
    torch.testing.assert_close(training.settle(), real, rtol=0, atol=1e-6)
    assert training.sent_bytes == pytest.approx(sent, rel=0.15 if wire_dtype is torch.int8 else 0.1)  # cache lines


def test_messages_that_the_lab_does_not_round_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"got wire_dtype=torch.bfloat16 of adpsgd in the Lab, expected None, or .* of ar, dpsgd"
    ):
        trained(LabPlan.of("adpsgd", wire_dtype=torch.bfloat16), task(), steps=0)


@pytest.mark.parametrize("net", [{"dropout": 0.2}, {"has_branch": True}])
def test_a_model_that_vmap_does_not_allow_is_trained_by_a_loop(net: dict[str, Any]) -> None:
    training = trained("sgp", task(**net))
    assert training.models.by == "loop"
    assert float(training.models.losses.mean()) < 1.4
    again, other = trained("sgp", task(**net)), trained("sgp", task(**net), seed=1)
    assert torch.equal(again.models.x, training.models.x)
    assert not torch.equal(other.models.x, training.models.x)


def test_each_worker_has_dropout_of_its_own() -> None:
    same = LabTask(lambda: Net(dropout=0.5), loss, lambda worker, step, generator: fixed, sgd())
    fixed = data(0, 0, torch.Generator())
    fixed = fixed[0].float(), fixed[1]
    losses = trained("ar", same, steps=1).models.losses
    assert len(losses.unique()) == N


@pytest.mark.parametrize("what", ["sgp", "adpsgd"])
def test_any_optimizer_steps_each_worker(what: str) -> None:
    """Adafactor looks at a whole matrix, so each worker has an optimizer of its own; so it is at one's own pace."""
    own = LabTask(lambda: Net(), lambda *_: torch.tensor(0.0), data, torch.optim.Adafactor)
    assert (
        len(LabTraining(LabPlan.of(what), Setting(N, None, Compute(0.1), Network("1 Gbit/s")), own).models.optimizers)
        == N
    )
    alone = trained(what, task(lambda p: torch.optim.AdamW(p, lr=0.01)), by="loop")
    assert len(alone.models.optimizers) == (1 if what == "sgp" else N)


def test_groups_by_dimension_are_those_of_one_worker() -> None:
    """Stacked parameters have one dimension more, by which a bias would be a matrix: each worker has an optimizer."""

    def by_dimension(parameters: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in parameters if (p.dim() > 1) is is_matrix], "lr": 0.1 * is_matrix}
            for is_matrix in (True, False)
        ]
        return torch.optim.SGD(groups)

    training = trained("ar", task(by_dimension))
    views, start = (each.models.views(each.models.x) for each in (training, trained("ar", task(sgd()), steps=0)))
    assert torch.equal(views["model.first.bias"], start["model.first.bias"])
    assert not torch.equal(views["model.first.weight"], start["model.first.weight"])
    assert len(training.models.optimizers) == N


def test_optimizers_of_matrices_step_each_worker() -> None:
    own = LabTask(lambda: nn.Linear(8, 4, bias=False).double(), loss, data, torch.optim.Muon)
    assert len(trained("sgp", own).models.optimizers) == N


def test_an_optimizer_gets_the_model_of_its_worker() -> None:
    """Also where two layers share a parameter, where one is frozen, and where the loss has parameters."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen, self.last = (nn.Linear(8, 8) for _ in range(3))
            self.last.weight = self.first.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.frozen(self.first(x)))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.scale * loss(model, batch)

    def by_model(parameters: Any) -> torch.optim.Optimizer:
        model = parameters.model
        assert model.last.weight is model.first.weight
        assert {id(p) for p in model.parameters() if p.requires_grad} < {id(p) for p in parameters}
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def by_list(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.numel() > 1], lr=0.1)  # without the scale

    scaled = Scaled().double()
    ends = [trained("sgp", LabTask(lambda: Tied().double(), scaled, data, make)).models for make in (by_model, by_list)]
    assert torch.equal(ends[0].x, ends[1].x)
    moved = {name: not torch.equal(view[0], view[1]) for name, view in ends[0].views(ends[0].x).items()}
    assert moved.pop("loss.scale") is False
    assert all(moved.values())


def test_an_optimizer_with_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an optimizer that steps without a closure"):
        trained("sgp", task(torch.optim.LBFGS), steps=0)


def test_parameters_of_several_dtypes_are_kept_in_the_widest() -> None:
    """The forward gets each parameter in its own dtype; a frozen one keeps its dtype."""

    class Mixed(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16).to(dtype), nn.Linear(16, 4).double()
            self.first.requires_grad_(dtype is torch.float32)
            nn.init.ones_(self.first.weight), nn.init.zeros_(self.first.bias)

        def forward(self, x: Tensor) -> Tensor:
            assert self.first.weight.dtype in (torch.float32, torch.bfloat16)
            return self.last(self.first(x.to(self.first.weight.dtype)).tanh().double())

    training = trained("choco:ring:sign", LabTask(lambda: Mixed(torch.float32), loss, data, sgd()))
    assert training.models.x.dtype == torch.float64
    assert training.models.num_bytes == 4 * (8 * 16 + 16) + 8 * (16 * 4 + 4)
    mean = training.models.mean_model(training.settle(), training.workers)
    assert dict(mean.named_parameters())["first.weight"].dtype == torch.float32
    loop = trained("choco:ring:sign", LabTask(lambda: Mixed(torch.float32), loss, data, sgd()), by="loop")
    torch.testing.assert_close(loop.models.x, training.models.x, rtol=0, atol=1e-5)
    frozen = trained("sgp", LabTask(lambda: Mixed(torch.bfloat16), loss, data, sgd()))
    assert frozen.models.num_bytes == 8 * (16 * 4 + 4)


def test_a_stacked_optimizer_is_one_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = trained("dpsgd:ring", task())
    monkeypatch.setattr("gossip_modules.lab.models.ELEMENTWISE", frozenset())
    torch.testing.assert_close(trained("dpsgd:ring", task()).models.x, stacked.models.x, rtol=0, atol=1e-9)


def test_a_scheduler_changes_the_rate() -> None:
    own = task(sgd())
    own.scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.0)
    at_two, at_nine = trained("ar", own, steps=2), trained("ar", own)
    torch.testing.assert_close(at_two.models.x, at_nine.models.x)


def test_all_reduce_averages_gradients() -> None:
    """Also with Adam, whose step is no linear function of the gradient."""
    own = task()
    module = own.model()
    module.load_state_dict(trained("ar", own, steps=0).models.module.model.state_dict())
    optimizer = adam(module.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([loss(module, own.batch(worker, step, 0)) for worker in range(N)]).mean().backward()
        optimizer.step()
    training = trained("ar", own)
    expected = torch.cat([dict(module.named_parameters())[name[6:]].flatten() for name in training.models.names])
    torch.testing.assert_close(training.models.x[2], expected.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_reduce_in_16_bits_adds_gradients_as_the_hooks_of_ddp_do(name: str) -> None:
    """g_i is rounded, then g_i / n, then the sum; the bytes are half of those in float32."""
    own, dtype = task(), getattr(torch, name)
    module = own.model()
    module.load_state_dict(trained("ar", own, steps=0).models.module.model.state_dict())
    optimizer = adam(module.parameters())
    for step in range(STEPS):
        sums = [torch.zeros_like(parameter) for parameter in module.parameters()]
        for worker in range(N):
            gradients = torch.autograd.grad(loss(module, own.batch(worker, step, 0)), list(module.parameters()))
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient.to(dtype) / N)
        for parameter, total in zip(module.parameters(), sums, strict=True):
            parameter.grad = total.to(dtype).to(parameter)
        optimizer.step()
    training, plain = trained(f"ar+{name}", own), trained("ar", own)
    expected = torch.cat([dict(module.named_parameters())[key[6:]].flatten() for key in training.models.names])
    torch.testing.assert_close(training.models.x[2], expected.detach(), rtol=0, atol=1e-5)
    assert not torch.equal(training.models.x, plain.models.x)
    share = 2 / plain.models.x.element_size()
    assert training.sent_bytes == pytest.approx(plain.sent_bytes * share, rel=0.01)


# Workers that die or join.


@pytest.mark.parametrize(
    "what", ["sgp", "dpsgd:ring", "DiLoCo(4)", "choco:ring:sign", "powergossip:ring", "adpsgd", "wagma", "d2"]
)
def test_workers_die_and_join(what: str) -> None:
    plain = trained(what, task(sgd()), steps=12)
    training = trained(what, task(sgd()), steps=12, events=[Kill(4, 1, seconds=3.0), Join(8, seconds=2.0)])
    assert training.workers.tolist() == [0, 2, 3, 4]
    assert training.seconds > plain.seconds + 3.0
    z = training.settle()
    assert z.isfinite().all()
    assert float((z - z.mean(0)).norm()) < 2.0
    assert training.num_steps[1] <= 4
    assert 0 < training.num_steps[4] <= 4


@pytest.mark.parametrize("what", ["dpsgd", "choco", "gasloc", "adpsgd", "qgdsgdm"])
def test_the_default_graph_follows_the_workers(what: str) -> None:
    result = compare(
        {"it": what},
        model=lambda: Net().double(),
        loss=loss,
        data=data,
        optimizer=sgd(momentum=0.9) if what == "qgdsgdm" else sgd(),
        workers=[4],
        steps=6,
        every=2,
        events=[Kill(2, 1), Join(4)],
    )
    assert all(np.isfinite(row["loss"]) for row in result.rows if row["step"])


def test_events_outside_the_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got LabKill.step=9, .* in a run of 2 steps"):
        compare_with("sgp", workers=[4], events=[Kill(9, 1)])


def test_survivors_go_on_with_their_memory() -> None:
    """With equal data on all workers a death changes nothing: the momentum of the outer optimizer goes on."""
    own = LabTask(lambda: Net().double(), loss, lambda worker, step, generator: data(0, step, torch.Generator()), sgd())
    runs = [trained("DiLoCo(3)", own, steps=12, events=events) for events in ([], [Kill(5, 2)])]
    torch.testing.assert_close(runs[0].settle()[0], runs[1].settle()[0], rtol=0, atol=1e-12)


def test_an_exact_average_after_a_death_is_of_the_survivors() -> None:
    training = trained("LocalSGD(6)", task(sgd()), steps=6, events=[Kill(3, 0)])
    z = training.settle()
    torch.testing.assert_close(z, z[:1].expand(3, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("what", "events", "expected"),
    [
        ("dpwa", [Kill(2, 0)], "got events with dpwa, expected none: its workers come and go"),
        ("sgp", [Kill(2, 9)], r"got LabKill\(step=2, worker=9, .*, expected one of the workers \[0, 1, 2, 3\]"),
    ],
)
def test_events_that_cannot_be(what: str, events: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        trained(what, task(sgd()), events=events)


# compare.


def compared(**others: Any) -> Result:
    arguments: dict[str, Any] = {
        "model": lambda: Net().double(),
        "loss": loss,
        "data": data,
        "optimizer": sgd(0.9),
        "workers": [2, 4],
        "steps": 6,
        "seeds": [1, 2],
        "every": 2,
        "network": Network.regions({"eu": 1, "us": 1}, inside="10 Gbit/s", between="100 Mbit/s, 80 ms"),
        "evaluate": lambda model: float(loss(model, data(9, 9, torch.Generator().manual_seed(9)))),
        **others,
    }
    return compare({"mine": gm.DiLoCo(sync_every=3), "sgp": "sgp"}, **arguments)


@pytest.mark.parametrize("name", ["workers", "seeds"])
def test_a_number_in_place_of_a_list_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"got {name}=4, expected a list, such as {name}=\[4\]"):
        compared(**{name: 4})


def test_compare_gives_a_curve_for_each_cell() -> None:
    result = compared()
    assert len(result.last) == 2 * 2 * 2
    assert [row["step"] for row in result.rows[:4]] == [0, 2, 4, 6]
    assert all(row["by"] == "vmap" for row in result.last)
    assert all(row["seconds"] > 6 * (0.1 + 0.08) for row in result.last if row["method"] == "sgp")
    assert all(row["evaluation"] < 1.5 for row in result.last)
    assert str(compared().rows) == str(result.rows)


@pytest.mark.parametrize("by", ["vmap", "loop"])
def test_compare_computes_the_workers_as_it_is_told(by: str) -> None:
    result = compared(seeds=[1], workers=[2], by=by)
    assert [row["by"] for row in result.last] == [by, by]


def test_another_way_to_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="got by='map', expected 'vmap', 'loop' or 'compile'; leave it out"):
        compared(by="map")


def test_a_cell_that_is_done_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cells.csv"
    first = compared(seeds=[1], path=path)
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("sgp") + 5])  # of the last cell a row is cut off
    steps: list[int] = []
    monkeypatch.setattr("gossip_modules.lab.comparison.Models.step", counted(steps))
    again = compared(seeds=[1], path=path)
    assert len(steps) == 6
    assert again.last == first.last
    assert path.read_text() == whole
    copy = tmp_path / "folder" / "copy.csv"
    first.to_csv(copy)
    assert copy.read_text() == whole
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"with columns \['a', 'b'\], expected .*; choose another file"):
        compared(path=path)


@pytest.mark.parametrize(
    "others",
    [
        {"optimizer": sgd(0.8)},
        {"network": "1 Gbit/s"},
        {"every": 3},
        {"by": "loop"},
        {"events": [Join(3)]},
        {"data": lambda *_: data(1, 1, torch.Generator())},
        {"model": lambda: Net(has_norm=True).double()},
    ],
    ids=lambda others: next(iter(others)),
)
def test_a_file_of_another_setting_is_refused(others: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    compared(seeds=[1], workers=[2], steps=4, path=path)
    text = path.read_text()
    with pytest.raises(ValueError, match=r"got .*cells.csv with rows of the settings .*; choose another file"):
        compared(seeds=[1], workers=[2], steps=4, path=path, **others)
    assert path.read_text() == text
    assert len(compared(seeds=[1, 2], workers=[2], steps=4, path=path).last) == 4


def test_a_file_that_cannot_be_written_is_known_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr("gossip_modules.lab.comparison.Models.step", counted(steps))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        compared(path=tmp_path / "file" / "cells.csv")
    assert steps == []


def counted(steps: list[int]) -> Any:
    from gossip_modules.lab.models import Models

    real = Models.step

    def step(self: Any, z: Tensor, k: int, workers: Any, **others: Any) -> None:
        steps.append(k)
        real(self, z, k, workers, **others)

    return step


def test_methods_that_do_not_fit_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr("gossip_modules.lab.comparison.Models.step", counted(steps))
    with pytest.raises(ValueError, match="got world_size=3, expected a power of two"):
        compare_with("dpsgd:hypercube", workers=[4, 3])
    with pytest.raises(ValueError, match="got 7, expected an algorithm"):
        compare_with(7, workers=[4])
    with pytest.raises(ValueError, match=r"got LabKill.step=1, worker=3, .*, expected one of the workers .0, 1, 2."):
        compare_with("sgp", workers=[4, 3], events=[Kill(1, 3)])
    with pytest.raises(ValueError, match=r"expected one of the workers .1.; at least one stays"):
        compare_with("sgp", workers=[2], events=[Kill(1, 0), Kill(1, 1)])
    with pytest.raises(ValueError, match="got world_size=7, expected a power of two"):
        compare_with("dpsgd:hypercube", workers=[8], events=[Kill(1, 0)])
    with pytest.raises(ValueError, match="got steps=-1, expected at least 1"):
        compare({"it": "sgp"}, model=Net, loss=loss, data=data, optimizer=sgd(), steps=-1, workers=[2])
    assert steps == []


def compare_with(what: Any, **others: Any) -> Result:
    return compare({"it": what}, model=Net, loss=loss, data=data, optimizer=sgd(), steps=2, **others)


def test_an_algorithm_that_writes_momentum_needs_sgd() -> None:
    with pytest.raises(ValueError, match=r"got AdamW, expected torch.optim.SGD with momentum"):
        trained(gm.QGDSGDm(), task(), steps=0)


def test_links_between_regions_are_slower() -> None:
    workers = np.arange(4)
    links = Network.regions({"eu": 1, "us": 1}, inside="10 Gbit/s", between="100 Mbit/s, 80 ms").on(workers)
    pairs = links.pair_seconds(np.array([0, 1]), np.array([1, 2]), links.plain_message(0)._replace(num_bytes=1.25e6))
    assert pairs == pytest.approx([1e-3 / 0.957 + 1e-4, 0.1 / 0.957 + 0.08])
    each = Network([["1 Gbit/s", "1 Mbit/s"], ["1 kbit/s", "1 Gbit/s"]], shares=(1, 1)).on(np.arange(2))
    assert each.pair_seconds(np.array([0]), np.array([1]), links.plain_message(0)._replace(num_bytes=125.0)) == (
        pytest.approx([1e-3 / 0.957 + 1e-4])
    )
