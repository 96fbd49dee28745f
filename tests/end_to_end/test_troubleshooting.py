"""docs/troubleshooting.md has every class of error and the messages of the library, as they are now."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gossip_modules as gm
from gossip_modules.dpwa import LossInterpolation
from gossip_modules.extend import PushPull, PushSum
from tests.harness.messages import Message, error_classes, messages, texts
from tests.harness.pages import ROOT
from tests.harness.ranks import run_ranks, solo_group

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "gossip_modules"
BUILT_IN = {"RuntimeError", "ConnectionError", "TimeoutError", "FloatingPointError", "PermissionError", "TypeError"}
SHOWN = [
    tuple(line.split(": ", 1))
    for block in re.findall(r"^```\{ \.text \.message \}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    for line in block.split("\n")
    if line
]
# Messages that other messages contain or take the place of: no script sees them alone.
INTERNAL = ("NotMet", "ConnectionLost", "Transient", "Permanent")
INTERNAL_TEXTS = (
    "the wait was given up",
    "got a job for the thread",
    "worker .* failed:",
    "of real time without a wait",
)
X, Y = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)


@pytest.fixture(scope="module")
def own() -> set[str]:
    return error_classes(PACKAGE)


@pytest.fixture(scope="module")
def explained(own: set[str]) -> set[str]:
    return {*own, *BUILT_IN, "ImportError", "ModuleNotFoundError"}


@pytest.fixture(scope="module")
def known(explained: set[str]) -> list[Message]:
    return list(messages(PACKAGE, {*explained, "ValueError", "AttributeError"}))


def test_every_class_of_error_is_in_the_table(own: set[str]) -> None:
    table = PAGE.partition("## Classes of errors")[2]
    assert len(own) > 10
    assert sorted(name for name in own if f"`{name}`" not in table) == []


def test_every_message_has_an_entry(explained: set[str], known: list[Message]) -> None:
    texts = {kind: [text for shown, text in SHOWN if shown == kind] for kind in explained}
    texts["warning"] = [text for shown, text in SHOWN if shown.endswith("Warning")]
    found = [message for message in known if message.kind in texts and message.kind not in INTERNAL]
    assert len(found) > 100
    missing = [
        f"{message.place} {message.kind}: {message.words}"
        for message in found
        if not any(message.is_whole(text) for text in texts[message.kind])
    ]
    assert [text for text in missing if not any(re.search(internal, text) for internal in INTERNAL_TEXTS)] == []


def test_every_message_of_the_page_is_in_the_code(known: list[Message]) -> None:
    shown = [text for _, text in SHOWN if not text.startswith("ranks do not agree")]  # which has many short parts
    old = [text for text in shown if not any(message.is_whole(text) for message in known)]
    parts = list(texts(PACKAGE))
    assert [text for text in old if not any(part.is_in(text) for part in parts)] == []


def test_every_entry_has_an_anchor_a_cause_and_a_remedy() -> None:
    headings = re.findall(r"^##+ .*$", PAGE, flags=re.MULTILINE)
    anchors = re.findall(r"^##+ .*\{ #([\w-]+) \}$", PAGE, flags=re.MULTILINE)
    assert len(anchors) == len(set(anchors)) == len(headings)
    for entry in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]:
        if "```" in entry and not entry.startswith("Tests with Chaos"):
            assert "**Cause" in entry, entry[:40]
            assert "emedy" in entry, entry[:40]


def wrapped(**options: Any) -> gm.GossipDataParallel:
    return gm.GossipDataParallel(nn.Linear(4, 3), process_group=solo_group(), **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, num_steps: int = 1, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or sgd(model)
    for _ in range(num_steps):
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def step_without_forward() -> None:
    model = wrapped()
    optimizer = sgd(model)
    for _ in range(2):
        model.module(X).sum().backward()
        optimizer.step()


def step_in_eval_mode() -> None:
    model = wrapped()
    optimizer = train(model)
    model.eval()
    train(model, 2, optimizer)


def recompute() -> None:
    checkpoint(wrapped(), X.clone().requires_grad_(), use_reentrant=True).sum().backward()


def round_after_close() -> None:
    model = wrapped()
    model.close()
    model.gossip_step()


def round_in_average() -> None:
    model = wrapped()
    with model.averaged():
        model.gossip_step()


def round_in_backward() -> None:
    model = wrapped()
    output = model(X)
    output.register_hook(lambda _: model.gossip_step())
    output.sum().backward()


def second_step() -> None:
    model = wrapped(algorithm=gm.QGDSGDm())
    optimizer = train(model)
    model(X).sum().backward()
    optimizer.step()
    optimizer.step()


def extra_forwards() -> None:
    model = wrapped()
    optimizer = sgd(model)
    for _ in range(2):
        model(X).sum().backward()
        train(model, 1, optimizer)


def drop_gradients() -> None:
    model = wrapped()
    optimizer = sgd(model)
    for _ in range(4):
        model(X).sum().backward()
        optimizer.zero_grad()
        train(model, 1, optimizer)


def step_a_copy() -> None:
    model = wrapped()
    other = copy.deepcopy(model.module)
    optimizer = sgd(other)
    for _ in range(12):
        model(X)
        train(other, 1, optimizer)


def train_after_close() -> None:
    model = wrapped()
    train(model)
    model.close()
    train(model)


def load_without_metadata() -> None:
    model = wrapped()
    model.load_state_dict(dict(model.state_dict()))


def train_on_equal_data() -> None:
    def body(group: Any) -> None:
        torch.manual_seed(0)
        model = gm.GossipDataParallel(nn.Linear(4, 3), process_group=group)
        train(model, 10)
        with model.averaged():
            pass
        model.close()

    run_ranks(2, body)


def train_without_a_round() -> None:
    def body(group: Any) -> None:
        model = gm.GossipDataParallel(nn.Linear(4, 3), process_group=group, algorithm=gm.DiLoCo(sync_every=500))
        train(model, 40)
        model.close()

    run_ranks(2, body)


def wrap_different_models() -> None:
    run_ranks(2, lambda group: gm.GossipDataParallel(nn.Linear(4, 3 + group.rank()), process_group=group, timeout=5))


def wrap_with_different_options() -> None:
    run_ranks(2, lambda g: gm.GossipDataParallel(nn.Linear(4, 3), process_group=g, timeout=5, overlap=g.rank() == 0))


def pairwise(**options: Any) -> gm.PairwiseDataParallel:
    return gm.PairwiseDataParallel(nn.Linear(4, 3), name="w0", peers={"w0": "tcp://127.0.0.1:*"}, **options)


PROVOKED: Mapping[str, list[Callable[[], object]]] = {
    "not-initialised": [lambda: gm.GossipDataParallel(nn.Linear(4, 3)), gm.Progress],
    "arguments": [
        lambda: wrapped(graph="rnig"),
        lambda: wrapped(max_staleness=2),
        lambda: wrapped(algoritm="d2"),
        lambda: gm.GossipDataParallel(nn.Linear(4, 3), "ring"),  # type: ignore[call-arg]
    ],
    "foreign-arguments": [
        lambda: wrapped(static_graph=True),
        lambda: wrapped(gossiper=PushPull()),
        lambda: gm.TorusGraph,  # type: ignore[attr-defined]
        lambda: wrapped().transfer_params(),
        lambda: wrapped(gossiper=PushPull(), algorithm=PushSum()),
        lambda: wrapped().reducer,
    ],
    "other-wrapper": [lambda: gm.GossipDataParallel(wrapped(), process_group=solo_group())],
    "different-ranks": [wrap_different_models, wrap_with_different_options],
    "no-round": [step_without_forward],
    "eval-mode": [step_in_eval_mode],
    "recomputation": [recompute],
    "gossip-step": [round_after_close, round_in_average, round_in_backward],
    "second-step": [second_step],
    "transforms": [lambda: pickle.dumps(wrapped()), lambda: torch.fx.symbolic_trace(wrapped())],
    "metrics": [lambda: gm.MetricsLogger(nn.Linear(2, 2), to=[print]), lambda: gm.MetricsLogger(wrapped(), to=None)],  # type: ignore[arg-type]
    "equal-data": [train_on_equal_data],
    "extra-forwards": [extra_forwards],
    "dropped-gradients": [drop_gradients],
    "copied-parameters": [step_a_copy],
    "alone": [lambda: train(wrapped(rounds="manual"), 101), train_without_a_round, train_after_close],
    "state-dict": [
        lambda: wrapped().load_state_dict(nn.Linear(4, 3).state_dict()),
        lambda: wrapped().load_state_dict({}),
        lambda: gm.gossip(nn.Linear(4, 3), process_group=solo_group()).load_state_dict(wrapped().state_dict()),
        load_without_metadata,
    ],
    "dpwa-others": [lambda: train(pairwise(interpolation=LossInterpolation()), 2)],
}


@pytest.mark.parametrize("anchor", PROVOKED)
def test_a_mistake_gives_the_message_of_its_entry(anchor: str) -> None:
    entry = PAGE.partition(f"{{ #{anchor} }}")[2].partition("\n##")[0]
    for mistake in PROVOKED[anchor]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                mistake()
                said = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
            except Exception as error:  # noqa: BLE001 (its text is compared)
                said = [f"{type(error).__name__}: {error}"]
        assert said
        assert [text for text in said if text not in entry.splitlines()] == []


def test_a_message_that_is_new_is_seen(tmp_path: Path) -> None:
    source = """
class OddError(ValueError):
    pass

def check(n):
    text = f"got {n} ranks, expected others"
    if n:
        raise OddError(text)
    return RuntimeError(f"{n}: " "no " f"{n} such thing was ever there")
"""
    (tmp_path / "odd.py").write_text(source, encoding="utf-8")
    assert error_classes(tmp_path) == {"OddError"}
    odd, other = sorted(messages(tmp_path, {"OddError", "RuntimeError"}), key=lambda message: message.kind)
    assert (odd.kind, odd.place, odd.words) == ("OddError", "odd.py:8", "got ... ranks, expected others")
    assert odd.is_whole("got 3 ranks, expected others")
    assert other.is_whole("1: no 2 such thing was ever there")
    assert not other.is_whole("no such thing")
