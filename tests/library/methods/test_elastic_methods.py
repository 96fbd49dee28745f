"""Which methods take a membership: the entries say so, and their wrappers do what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import Membership
from gossip_modules.methods import METHODS, Context, WrapperOptions, wrap
from gossip_modules.methods.__main__ import membership_table
from gossip_modules.testing import Chaos, Worker


class _Taken(Exception):
    """A wrapper has come to a `_Trial`: it takes a membership."""


class _Trial(Membership):
    """A membership in which nobody trains, to ask a wrapper whether it takes one."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), min_workers=1, host="127.0.0.1")

    def attach(self, participant: Any) -> NoReturn:
        """The last thing that a wrapper does, when it has refused nothing."""
        raise _Taken


def ask(text: str, **options: Any) -> None:
    """Raises what the wrapper says of a membership."""
    wrap(text, nn.Linear(2, 1), WrapperOptions(**options), Context(membership=_Trial()))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_a_membership_or_its_entry_says_why_not(name: str) -> None:
    if METHODS[name].needs_fixed_ranks:
        with pytest.raises(ValueError, match=r"got a membership for .*, expected None: "):
            ask(name)
        return
    with pytest.raises(_Taken):
        ask(name)


def test_the_guide_has_the_table_of_the_wrappers() -> None:
    """Make it with `python -m gossip_modules.methods`."""
    table, guides = membership_table(), Path(__file__).parents[3] / "docs" / "guides"
    assert table in (guides / "elasticity.md").read_text(encoding="utf-8")
    cells = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    rows = {wrapper.strip("`"): (taken.split(", "), refused.split("<br>")) for wrapper, taken, refused in cells}
    assert rows["BilatGossipDataParallel"] == (["AD-PSGD", "A2CiD2"], ["-"])
    for name, method in METHODS.items():
        taken, refused = rows[method.example.partition("(")[0]]
        assert (method.title in taken) == (not method.needs_fixed_ranks), name
        assert (f"{method.title}: {method.needs_fixed_ranks}" in refused) == bool(method.needs_fixed_ranks)


@pytest.mark.parametrize("page", ["failures.md", "stragglers.md"])
def test_other_guides_do_not_say_by_themselves_which_wrappers_take_a_membership(page: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "guides" / page).read_text(encoding="utf-8")
    assert "(elasticity.md#which-wrappers-take-it)" in text
    sentences = re.split(r"(?<=[.:])\s|\n\n|\|\n", text)
    ends = [sentence for sentence in sentences if "ends the job" in " ".join(sentence.split())]
    assert ends
    assert all("membership" in sentence for sentence in ends), "with one, the others train on"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("dpsgd", {"graph": "hypercube"}, r"does not exist for \[3, 5, .*\] workers"),
        ("gasloc", {"graph": "hypercube"}, r"does not exist for \[3, 5, .*\] workers"),
        ("exactdiffusion", {"graph": "torus"}, r"does not exist for \[5, 7, .*\] workers"),
        ("adpsgd", {"graph": "ring"}, "expected a bipartite graph"),
        ("matcha", {"graph": "matcha0"}, "for 2 ranks, expected the 8 ranks that it has"),
        ("WAGMA(wait_avoiding=False)", {}, "got wait_avoiding=False with a membership"),
        ("WAGMA(group_size=1)", {}, "got group_size=1 with a membership"),
    ],
)
def test_options_that_a_membership_does_not_carry(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(text, **options)


def train(text: str) -> dict[int, torch.Tensor]:
    """What two workers have after four steps, each towards a number of its own."""

    def body(worker: Worker) -> torch.Tensor:
        membership = worker.membership(min_workers=2, timeout=60, min_deadline=20.0)
        model = nn.Linear(4, 1, bias=False)
        wrapper = wrap(text, model, WrapperOptions(), Context(membership=membership))
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
        for step in membership.steps(4):
            assert membership.world_size == 2
            (wrapper(torch.ones(1, 4)) - 10 * worker.rank - step).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with wrapper.averaged():
            result = model.weight.detach().clone()
        if text == "adpsgd":  # nobody leaves before all have the average
            membership.transport.all_reduce(torch.zeros(1), what="the end")
        wrapper.close()
        return result

    return Chaos().run(body, 2)


@pytest.mark.parametrize(
    "text",
    [
        "LocalSGD(sync_every=2)",
        "GASLoC(sync_every=2)",
        "D2()",
        "Choco(TopK(0.5), step_size=0.2)",
        "WAGMA(sync_period=2)",
        "adpsgd",
        "DiLoCo(sync_every=2)",
    ],
)
def test_workers_train_together(text: str) -> None:
    results = train(text)
    assert len(results) == 2
    assert torch.equal(results[0], results[1])
    assert results[0].isfinite().all()
