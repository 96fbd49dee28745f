"""Which methods take a membership: their wrappers are asked, and what they refuse is the reason that is given."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import Membership
from gossip_modules.methods import (
    METHODS,
    Context,
    MethodOptions,
    gossiper_method,
    why_fixed_ranks,
    without_unused,
    wrap,
)
from gossip_modules.methods.__main__ import membership_table
from gossip_modules.testing import Chaos, Worker
from tests.library.methods.test_methods import HalfStep

REFUSED = {
    "ar": "an all-reduce that survives its workers is torchft",
    "dpwa": "its workers come and go without one",
    "eagerdiloco": "expected a method that waits for its averages",
    "sparseloco": "expected a method that averages the drifts themselves",
    "relaysgd": "expected a gossiper whose rounds go on without peers that fail",
}


def alone() -> Context:
    return Context(membership=Membership(dist.HashStore(), min_workers=1))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_a_membership_or_its_wrapper_says_why_not(name: str) -> None:
    why = why_fixed_ranks(METHODS[name], MethodOptions())
    assert REFUSED.get(name, "") in why
    assert bool(why) == (name in REFUSED)
    if why:
        with pytest.raises(ValueError, match=r"got a membership for .*, expected None, or options .* Cause: "):
            wrap(name, nn.Linear(2, 1), MethodOptions(), alone())


def test_the_guide_has_the_table_of_what_the_wrappers_say() -> None:
    """Make it with `python -m gossip_modules.methods`."""
    table, guides = membership_table(), Path(__file__).parents[3] / "docs" / "guides"
    assert table in (guides / "elasticity.md").read_text(encoding="utf-8")
    cells = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    rows = {wrapper.strip("`"): (taken.split(", "), refused.split("<br>")) for wrapper, taken, refused in cells}
    assert rows["BilatGossipDataParallel"] == (["AD-PSGD"], ["-"])
    for name, method in METHODS.items():
        taken, refused = rows[method.example.partition("(")[0]]
        assert (method.title in taken) == (name not in REFUSED)
        assert any(line.startswith(f"{method.title}: ") for line in refused) == (name in REFUSED)


@pytest.mark.parametrize("page", ["failures.md", "stragglers.md"])
def test_other_guides_do_not_say_by_themselves_which_wrappers_take_a_membership(page: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "guides" / page).read_text(encoding="utf-8")
    assert "(elasticity.md#which-wrappers-take-it)" in text
    sentences = re.split(r"(?<=[.:])\s|\n\n|\|\n", text)
    ends = [sentence for sentence in sentences if "ends the job" in " ".join(sentence.split())]
    assert ends
    assert all("membership" in sentence for sentence in ends), "with one, the others train on"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgp", {"consensus_target": 2.0}, "ranks that may lose messages cannot all decide alike"),
        ("adpsgd", {"nprocs_per_node": 2}, ""),  # an option that it does not use
        ("sgp", {"nprocs_per_node": 2}, "the scripts start each process as a worker"),
        ("dpsgd", {"graph": "hypercube"}, r"does not exist for \[3, 5, .*\] workers"),
        ("gasloc", {"graph": "hypercube"}, r"does not exist for \[3, 5, .*\] workers"),
        ("exactdiffusion", {"graph": "torus"}, r"does not exist for \[5, 7, .*\] workers"),
        ("adpsgd", {"graph": "ring"}, "expected a bipartite graph"),
        ("matcha", {"graph": "matcha0"}, "for 2 nodes, expected the 8 nodes that it has"),
        ("wagma", {"wait_avoiding": False}, "got wait_avoiding=False with a membership"),
        ("wagma", {"group_size": 1}, "got group_size=1 with a membership"),
        ("choco", {"compressor": "qsgd", "compression_bits": 2}, "and no step_size, expected one"),
        ("streamingdiloco", {"outer_bits": 4}, "expected a method that averages the drifts themselves"),
    ],
)
def test_options_that_a_membership_does_not_carry(name: str, options: dict[str, Any], message: str) -> None:
    why = why_fixed_ranks(METHODS[name], MethodOptions(**options))
    assert bool(why) == bool(message)
    if message:
        with pytest.raises(ValueError, match=message):
            wrap(name, nn.Linear(2, 1), MethodOptions(**options), alone())


def test_an_entry_of_ones_own_is_asked_too() -> None:
    half = gossiper_method("half", lambda options, seed: HalfStep(), algorithm=HalfStep)
    assert "which says so by is_elastic = True" in why_fixed_ranks(half, MethodOptions())

    class Elastic(HalfStep):
        is_elastic = True

    third = gossiper_method("third", lambda options, seed: Elastic(), algorithm=Elastic)
    assert why_fixed_ranks(third, MethodOptions()) == ""

    closed: list[bool] = []
    alone = SimpleNamespace(close=lambda: closed.append(True))
    forgetful = replace(METHODS["dpsgd"], make=lambda module, options, context: alone)
    assert why_fixed_ranks(forgetful, MethodOptions()).endswith("does not hand on the membership of its context")
    assert closed == [True]


def train(name: str, options: MethodOptions) -> dict[int, torch.Tensor]:
    """What two workers have after four steps, each towards a number of its own."""

    def body(worker: Worker) -> torch.Tensor:
        membership = worker.membership(min_workers=2, timeout=60, min_deadline=20.0)
        model = nn.Linear(4, 1, bias=False)
        wrapper = wrap(name, model, options, Context(membership=membership))
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
        for step in membership.steps(4):
            assert membership.world_size == 2
            (wrapper(torch.ones(1, 4)) - 10 * worker.rank - step).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with wrapper.averaged():
            result = model.weight.detach().clone()
        if name == "adpsgd":  # nobody leaves before all have the average
            membership.transport.all_reduce(torch.zeros(1), what="the end")
        wrapper.close()
        return result

    return Chaos().run(body, 2)


@pytest.mark.parametrize("name", ["localsgd", "gasloc", "d2", "choco", "wagma", "adpsgd"])
def test_workers_train_together_by_the_recipes(name: str) -> None:
    options = without_unused(METHODS[name], MethodOptions(sync_period=2, compression_ratio=0.5))
    results = train(name, options)
    assert len(results) == 2
    assert torch.equal(results[0], results[1])
    assert results[0].isfinite().all()


def test_workers_train_together_by_an_outer_method_with_exact_averages() -> None:
    results = train("diloco", MethodOptions(sync_period=2))
    assert torch.equal(results[0], results[1])
