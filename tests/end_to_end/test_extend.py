"""The code of docs/extend runs as it stands: the blocks of a page one after the other, in one namespace."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import GossipDataParallel, RingGraph, registry
from gossip_modules.lab.planner import MAX_STEPS
from gossip_modules.methods import METHODS
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START, Point, descended, solve
from tests.harness.ranks import run_ranks
from tests.harness.scripts import script_outputs

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "extend"


def blocks(name: str) -> list[str]:
    """The Python blocks of a page."""
    page = (FOLDER / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def run_page(name: str) -> tuple[dict[str, object], str]:
    """The namespace that the blocks of a page leave, and what they print."""
    namespace: dict[str, object] = {"__name__": "page"}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for block in blocks(name):
            exec(compile(block, name, "exec", dont_inherit=True), namespace)  # as a file of its own
    return namespace, output.getvalue()


def test_every_page_is_in_the_table() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in FOLDER.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\((\w+\.md)\)", index)) == pages


def test_graph() -> None:
    _, output = run_page("graph.md")
    lines = output.splitlines()
    assert lines[0] == "round 0: rank 0 sends to (1,) and receives from (3,)"
    assert lines[3] == "round 3: rank 0 sends to (4,) and receives from (4,)"
    assert 0 < float(lines[4].split()[-1]) <= 1
    assert lines[5] == "after 8 rounds: 4.5"


def test_mixing() -> None:
    _, output = run_page("graph.md")
    plain, lazy = (float(gap) for gap in re.findall(r"(\d\.\d{3})", output.splitlines()[-1]))
    assert lazy == pytest.approx(plain / 2, abs=1e-3)  # the eigenvalues of the ring with thirds begin at -1/3


def test_compressor() -> None:
    _, output = run_page("compressor.md")
    assert output == "20 bytes for 40\n"


@pytest.fixture
def _no_new_methods() -> Iterator[None]:
    """What a page registers is gone after the test."""
    before = dict(METHODS)
    yield
    for name in set(METHODS) - set(before):
        del registry._METHODS[name]
    assert before == METHODS


@pytest.mark.usefixtures("_no_new_methods")
def test_algorithms() -> None:
    """They do what the page says of them; their law in float64; a registered one has a row in the simulator."""
    namespace, output = run_page("algorithm.md")
    agreement, untrusting, *trusting, periodic, plain, own = output.splitlines()
    without, with_momentum = (float(number) for number in re.findall(r"\d\.\de-\d\d", agreement))
    assert with_momentum < without / 100
    assert periodic == "the averaged weight is 1.50"
    (plain_steps, *_), (own_steps, *_) = (re.findall(r"\d+", line) for line in (plain, own))
    assert int(plain_steps) < int(own_steps) < MAX_STEPS  # it says less, so it takes more steps, and arrives
    assert METHODS["randomshare"].title == "Random share"
    check_momentum_gossip(namespace["MomentumGossip"])
    check_step_then_mix(namespace["StepThenMix"])
    found = [[float(number) for number in re.findall(r"-?\d\.\d\d", line)] for line in (untrusting, *trusting)]
    assert all(weight < 0 for weight in found[0])  # near the mean of the labels, -0.5
    assert len(found) == 3
    assert all(abs(weight - 1) < 0.02 for own in found[1:] for weight in own[:3])
    check_trust_gossip(namespace["TrustGossip"], momentum=0.0)
    check_trust_gossip(namespace["TrustQG"], momentum=0.4)
    check_random_share(namespace["RandomShare"])


RING = MetropolisHastingsMixing(RingGraph(5, peers_per_itr=2))
W = RING.matrix(0).double()


def check_momentum_gossip(algorithm: Any) -> None:
    x, m = torch.full((5,), START, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for num_steps in (0, *[1] * 6):  # a round comes before each step
        h = descended(x, num_steps)
        m = 0.4 * m + W @ h - h
        x = h + m
        assert float(x.mean()) == pytest.approx(float(h.mean()))
    torch.testing.assert_close(solve(lambda: {"algorithm": algorithm(0.4)}, num_steps=6), x, rtol=0, atol=1e-12)


def check_trust_gossip(algorithm: Any, *, momentum: float) -> None:
    """With a momentum it is quasi-global."""
    curvatures, minima = (torch.tensor(values, dtype=torch.float64) for values in (CURVATURES, MINIMA))
    x, mh = torch.full((5,), START, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for has_step in (False, *[True] * 6):  # a round comes before each step
        last = x
        if has_step:
            x = x - LEARNING_RATE * (momentum * mh + curvatures * (x - minima))
        losses = curvatures[:, None] / 2 * (x[None, :] - minima[:, None]).square()  # [i, j]: of the model of j on i
        trust = W * torch.exp((losses.diagonal()[:, None] - losses) / 0.3).clamp(max=1.0)
        x = x + (trust * (x[None, :] - x[:, None])).sum(1)
        if has_step:
            mh = momentum * mh + (1 - momentum) * (last - x) / LEARNING_RATE

    def body(group: dist.ProcessGroup) -> float:
        rank, point = group.rank(), Point()

        def loss(tensors: dict[str, Tensor]) -> float:
            return float(torch.func.functional_call(point, tensors, (rank,)).detach())

        wrapper = GossipDataParallel(point, algorithm=algorithm(loss, 0.3), mixing=RING, process_group=group)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=LEARNING_RATE, momentum=momentum)
        for _ in range(6):
            optimizer.zero_grad()
            wrapper(rank).backward()
            optimizer.step()
        wrapper(rank)
        wrapper.close()
        return point.x.item()

    torch.testing.assert_close(torch.tensor(run_ranks(5, body), dtype=torch.float64), x, rtol=0, atol=1e-12)


def check_step_then_mix(algorithm: Any) -> None:
    phi = torch.full((5,), START, dtype=torch.float64)
    for _ in range(4):
        phi = W @ (phi - 0.7 * (phi - descended(phi, 5)))
    options = {"algorithm": algorithm(5, lr=0.7, momentum=0.0), "graph": "ring"}
    torch.testing.assert_close(solve(lambda: options), phi, rtol=0, atol=1e-12)


def check_random_share(algorithm: Any) -> None:
    """Without training it reaches the mean."""
    values = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def body(group: dist.ProcessGroup) -> Tensor:
        module = nn.ParameterList([nn.Parameter(values[group.rank()].clone())])
        model = GossipDataParallel(
            module, algorithm=algorithm(0.5), init_sync=False, rounds="manual", process_group=group
        )
        for _ in range(60):
            model.gossip_step()
        model.close()
        return module[0].detach()

    for result in run_ranks(3, body):
        torch.testing.assert_close(result, values.mean(0))


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_an_algorithm_is_a_recipe(tmp_path: Path) -> None:
    """The page's script: its blocks but those that run ranks or the simulator."""
    shown = ("run_ranks", "gossip_modules.lab")
    script = [block for block in blocks("algorithm.md") if not any(name in block for name in shown)]
    assert len(script) == 7
    (tmp_path / "my_method.py").write_text("\n".join(script), encoding="utf-8")
    options = ["--recipe", "randomshare", "--epochs", "2", "--out-dir", str(tmp_path / "run")]
    first, *_ = script_outputs(tmp_path / "my_method.py", 2, *options)
    assert first.startswith("Random share: cnn on digits, 2 ranks")
    assert accuracy_of(first) > 80


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_task(tmp_path: Path) -> None:
    """The page's script, as its command line says."""
    (script,) = blocks("task.md")
    (tmp_path / "my_task.py").write_text(script, encoding="utf-8")
    options = ["--recipe", "choco", "--lr", "0.2", "--out-dir", str(tmp_path / "run")]
    first, *_ = script_outputs(tmp_path / "my_task.py", 2, *options)
    assert "the classes of a random matrix" in first
    assert accuracy_of(first) > 80


def accuracy_of(output: str) -> float:
    """What a run says at its end."""
    found = re.search(r"averaged model: test accuracy ([\d.]+) %", output)
    assert found, output
    return float(found[1])
