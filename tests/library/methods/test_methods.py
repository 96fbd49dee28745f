"""The registry of methods: its entries, and what one entry of a user's own gossiper gives."""

from __future__ import annotations

import doctest
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import gossip_modules as gm
from gossip_modules import methods, registry
from gossip_modules.lab import Consensus, LabPlan, advise, simulate
from gossip_modules.lab.__main__ import main as simulate_main
from gossip_modules.lab.models import Models
from gossip_modules.lab.plan import PlanRun
from gossip_modules.lab.planner import recipe_options
from gossip_modules.methods import (
    METHODS,
    WRAPPER_OPTIONS,
    Context,
    read_algorithm,
    register,
    wrap,
)
from gossip_modules.methods.__main__ import methods_table, step_sizes_table
from gossip_modules.methods.chosen import read_compressor
from gossip_modules.mixing_manager.graph_weights import default_mixing
from gossip_modules.wrappers.choices import written
from tests.harness.cases import each_once
from tests.harness.quadratics import START, descended, solve
from tests.harness.ranks import solo_group
from tests.library.lab.simulations import CLUSTER, LINKS, MODEL_BYTES, digits, made, start, workers
from train.command_line import read_command_line
from train.consensus_experiment.methods import variants
from train.job.errors import UsageError
from train.tasks.images.config import Config


@dataclass(frozen=True)
class HalfStep(gm.extend.Algorithm):
    """Goes half of the way that D-PSGD goes: x_i <- x_i + 1/2 sum_j W_ij (x_j - x_i)."""

    short_name: ClassVar[str] = "half"
    title: ClassVar[str] = "Half step"
    needs_symmetric_weights: ClassVar[bool] = True

    def round(self, v: gm.extend.Vectors, m: gm.extend.Memory, k: int) -> gm.extend.Round:
        x = m.scratch("x").set_(v.x)
        yield gm.extend.Mix(x)
        v.x.add_(v.x, alpha=-0.5).add_(x, alpha=0.5)


class Half(gm.compression.Compressor):
    """Half of each entry, as it is."""

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        return 8 * d

    def _encode(self, x: torch.Tensor, message: torch.Tensor, t: int) -> None:
        message.view(torch.float64).copy_(x / 2)

    def _add(self, message: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, alpha: float) -> None:
        target.add_(message.view(torch.float64), alpha=alpha)

    def __repr__(self) -> str:
        return "Half()"


@pytest.fixture
def own() -> Iterator[methods.Method]:
    """The entry of HalfStep, for the time of a test."""
    method = register(HalfStep)
    yield method
    del registry._METHODS["half"]


def test_an_entry_says_where_its_algorithm_stands() -> None:
    root = Path(gm.__file__).parents[1]
    for name, method in METHODS.items():
        assert method.name == name
        kind = method.algorithm
        name_of_class = kind.rpartition(":")[2] if isinstance(kind, str) else kind.__name__
        assert f"class {name_of_class}" in (root / method.file).read_text(encoding="utf-8")
        assert method.options <= set(WRAPPER_OPTIONS)
        assert name == "ar" or method.paper is not None
        assert all(repr(read_compressor(code)) for code in method.step_sizes)


def test_an_algorithm_of_ones_own_is_an_entry_by_its_class() -> None:
    @dataclass(frozen=True)
    class Twice(gm.DiLoCo):
        """Does as DiLoCo does."""

        short_name = "twice"
        title = "Twice"

    method = register(Twice, text="Twice(sync_every=3)")
    assert (method.name, method.title, method.summary) == ("twice", "Twice", "Does as DiLoCo does.")
    assert method.example == "GossipDataParallel(model, algorithm=Twice(sync_every=3))"
    try:
        assert read_algorithm("twice").made == Twice(3)
        assert read_algorithm("Twice(sync_every=4)").made == Twice(4)
    finally:
        del registry._METHODS["twice"]


def test_names_are_taken_once() -> None:
    for taken in ("choco", "allreduce"):
        with pytest.raises(ValueError, match=f"got the name '{taken}' of a method, which is taken; choose another"):
            register(replace(METHODS["sgp"], name=taken))
    with pytest.raises(ValueError, match="got the name 'My method' of a method, expected letters, digits and _ in"):
        register(replace(METHODS["sgp"], name="My method"))


def test_the_tables_have_a_row_for_each_entry() -> None:
    rows = methods_table().splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == list(METHODS)
    assert (
        "| `choco` | CHOCO-SGD | `Choco(SignNorm(), step_size=0.45)` | "
        "`GossipDataParallel(model, algorithm=Choco(SignNorm(), step_size=0.45))` |" in rows[7]
    )
    assert "| choco | `TopK(0.01)` | 0.0375 |" in step_sizes_table()


@pytest.mark.parametrize("name", ["DiLoCo(5)", "EagerDiLoCo(5)", "SparseLoCo(5)", "SlowMo(5)", "GASLoC(5):ring"])
def test_the_simulator_takes_outer_steps_as_training_does(name: str) -> None:
    """Problem Q; the golden values of training are in tests/library/algorithms."""
    method, x = made(name, replace(CLUSTER, world_size=5)), torch.full((5, 1), START, dtype=torch.float64)
    for step in range(21):
        method.forward(x)
        if step < 20:
            x.copy_(descended(x[:, 0], 1)[:, None])
    outer, _, graph = name.partition(":")
    options = {"graph": gm.RingGraph(5, peers_per_itr=2)} if graph else {}
    algorithm = read_algorithm(outer).made
    torch.testing.assert_close(x[:, 0], solve(lambda: {"algorithm": algorithm, **options}), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gasloc:bipartite-exponential", "qgdsgdm:equi-static-undirected"])
def test_the_simulator_refuses_graphs_on_which_a_method_diverges(name: str) -> None:
    setting = replace(CLUSTER, world_size=10 if name.startswith("gasloc") else 32)
    with pytest.raises(ValueError, match="where the differences between ranks grow"):
        made(name, setting)


@pytest.mark.parametrize("method", [gm.DiLoCo, gm.StreamingDiLoCo, gm.EagerDiLoCo])
def test_the_simulator_compresses_drifts_as_training_does(method: type[gm.DiLoCo]) -> None:
    """Problem Q, whose models are one number, of which a message has half."""
    options: dict[str, Any] = {"fragments": 1, "delay": 0} if method is gm.StreamingDiLoCo else {}
    outer = method(5, compressor=Half(), momentum=0.5, **options)
    setting = replace(CLUSTER, world_size=5)
    simulated = made(outer, setting)
    x = torch.full((5, 1), START, dtype=torch.float64)
    for step in range(21):
        simulated.forward(x)
        if step < 20:
            x.copy_(descended(x[:, 0], 1)[:, None])
    torch.testing.assert_close(x[:, 0], solve(lambda: {"algorithm": outer}), rtol=0, atol=1e-12)
    assert simulated.sent_bytes == 4 * 4 * 8 * 11_175_000


def test_the_simulator_sends_the_messages_of_sparse_loco() -> None:
    """To each of the others, on a link that a message of the whole model would keep busy much longer."""
    setting = replace(CLUSTER, world_size=5)
    size = gm.compression.ChunkTopK(41, 4096, values=gm.compression.TwoBit()).num_bytes(11_175_000, torch.float32)
    waited, sparse = {}, "SparseLoCo(2, compressor=ChunkTopK(41, values=TwoBit()))"
    for name in (sparse, "DiLoCo(2)"):
        method, x = made(name, setting), torch.zeros(5, 100)
        for _ in range(5):  # outer steps before the third and the fifth
            method.forward(x)
        waited[name] = float(method.clock.waited_seconds.max())
        if name == sparse:
            assert method.sent_bytes == 2 * 4 * size
    assert 2 * 4 * LINKS.on(workers(5)).wire_seconds(size) < waited[sparse] < waited["DiLoCo(2)"]


def test_bytes_are_measured_on_messages_of_the_algorithm() -> None:
    setting = replace(CLUSTER, world_size=2)
    run = PlanRun(LabPlan.of("dpsgd").resolved(2), setting, Models(Consensus(), 2), workers(2))
    assert run.message_of(HalfStep(), None, 1.0) == LINKS.on(workers(2)).plain_message(MODEL_BYTES)
    message = run.message_of(gm.PowerGossip(rank=2), None, 1.0)
    assert message.num_bytes == pytest.approx(MODEL_BYTES / 256, rel=0.01)


@pytest.mark.parametrize(
    "algorithm", [gm.DiLoCo(5, lr=0.4), gm.GASLoC(5, momentum=0).over(gm.PowerGossip())], ids=["one", "over"]
)
def test_the_simulator_takes_the_object_or_text_that_training_takes(algorithm: Any) -> None:
    setting, problem = replace(CLUSTER, world_size=4), digits()
    found = simulate(algorithm, setting, problem, target=1e9, max_steps=1)
    by_text = simulate(written(algorithm), setting, problem, target=1e9, max_steps=1)
    assert replace(by_text, plan=found.plan) == found
    arguments = shlex.split(recipe_options(found.plan, setting))
    config = read_command_line(Config, description="", arguments=[*arguments, "--seed", "0"])
    assert config.chosen.made == algorithm


def test_one_entry_gives_a_recipe(own: methods.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip_modules.methods.wrapping.GossipDataParallel", lambda module, **arguments: arguments)
    config = read_command_line(Config, description="", arguments=["--recipe", "half", "--graph", "torus"])
    arguments: Any = wrap(config.recipe, nn.Linear(2, 2), config, Context(world_size=8))
    assert isinstance(arguments["algorithm"], HalfStep)
    assert repr(arguments["graph"](8)) == repr(gm.graph_manager.TorusGraph(8, peers_per_itr=3))
    assert config.identity["recipe"] == "half"


def test_one_entry_gives_a_row_of_the_simulator(own: methods.Method) -> None:
    mixing = default_mixing(gm.RingGraph(8, peers_per_itr=2), push_sum=False)
    method, x = made("half:ring", CLUSTER), start(8)
    expected = x + (mixing.matrix(0).to(x.dtype) @ x - x) / 2
    method.forward(x)
    torch.testing.assert_close(x, expected)
    prediction = simulate("half", CLUSTER, Consensus())
    assert prediction.has_reached
    assert prediction.num_steps > simulate("dpsgd", CLUSTER, Consensus()).num_steps


def test_one_entry_gives_a_row_of_the_table_and_of_the_consensus_experiment(own: methods.Method) -> None:
    summary = "Goes half of the way that D-PSGD goes: x_i <- x_i + 1/2 sum_j W_ij (x_j - x_i)."
    assert summary in methods_table().splitlines()[-1]
    ring = default_mixing(gm.RingGraph(2), push_sum=False)
    assert variants()["half"].make(ring, 1.0, 1.0, 0, shape=(2, 2)).algorithm == HalfStep()


def test_a_module_that_registers_methods_is_imported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_half.py").write_text(
        "from gossip_modules.methods import register\n"
        "from tests.library.methods.test_methods import HalfStep\n"
        "register(HalfStep)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        config = read_command_line(Config, description="", arguments=["--import", "my_half", "--recipe", "half"])
        assert config.recipe == "half"
        arguments = "--world-size 8 --problem Consensus() --methods half sgp --import my_half"
        assert simulate_main(arguments.split()) == 0
        assert "half" in capsys.readouterr().out
    finally:
        del registry._METHODS["half"], sys.modules["my_half"]
    assert simulate_main(["--world-size", "8", "--import", "nonesuch"]) == 2
    assert "got --import nonesuch (No module named 'nonesuch'), expected a module on" in capsys.readouterr().err
    with pytest.raises(UsageError, match="No module named 'nonesuch'"):
        read_command_line(Config, description="", arguments=["--import", "nonesuch"])


@pytest.mark.parametrize(("name", "n"), each_once(list(METHODS), [8, 9]))
def test_advice_can_be_typed_as_it_stands(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = replace(CLUSTER, world_size=n)
    prediction = simulate(name, setting, digits(), max_steps=1, target=1e9)
    arguments = shlex.split(recipe_options(prediction.plan, setting))
    config = read_command_line(Config, description="", arguments=arguments)
    assert config.recipe == name
    assert methods.unused_options(METHODS[name], config) == []
    for wrapper in ("methods.wrapping.GossipDataParallel", "ad_psgd.wrapper.BilatGossipDataParallel"):
        monkeypatch.setattr(f"gossip_modules.{wrapper}", lambda module, **arguments: arguments)
    if METHODS[name].simulated_graph is None:
        return
    context = Context(world_size=n, seed=setting.seed)
    wrapped: Any = wrap(config.algorithm or name, nn.Linear(2, 2), config, context)
    driver: Any = made(prediction.plan, setting).driver
    assert repr(wrapped["graph"](n)) == repr(driver.mixing.graph)


def test_the_advice_has_the_command() -> None:
    advice = advise([simulate("LocalSGD(7)", CLUSTER, digits(), target=1e9, max_steps=1)], CLUSTER)
    found = [sentence for sentence in advice.sentences if sentence.startswith("To train like this: ")]
    assert len(found) == 1
    launch = f"torchrun --standalone --nproc-per-node {CLUSTER.world_size} -m train.gossip_sgd"
    assert found[0].startswith(f'To train like this: {launch} --algorithm "LocalSGD(sync_every=7)" (')


def test_examples_run() -> None:
    assert doctest.testmod(methods).failed == 0


def test_the_step_size_is_the_published_one_everywhere() -> None:
    for code, expected in (("sign", 0.45), ("topk", 0.0375), ("randomk", 0.01), ("qsgd", 0.34)):
        assert f"step_size={expected})" in LabPlan.of(f"choco:ring:{code}").text
    assert "step_size=0.45" in METHODS["choco"].text
    with pytest.raises(
        ValueError, match=r"got deepsqueeze with QSGD\(8\) and no step_size, expected one: known are those of SignNorm"
    ):
        LabPlan.of("deepsqueeze:ring:qsgd")


def test_texts_of_the_page_are_algorithms_that_a_wrapper_takes() -> None:
    page = Path(gm.__file__).parents[1] / "docs" / "methods" / "index.md"
    texts = re.findall(r'--algorithm "(\w+\([^"]*)"', page.read_text(encoding="utf-8"))
    assert any(".over(" in text for text in texts)
    for text in texts:
        made = methods.read_algorithm(text).made
        gm.GossipDataParallel(nn.Linear(4, 4), process_group=solo_group(), push_sum=False, algorithm=made).close()
