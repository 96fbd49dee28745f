"""A worker with NaN in its model gets an error, and no other worker does, with each method that takes a membership."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel
from gossip_modules.methods import METHODS, Context, WrapperOptions, wrap
from gossip_modules.testing import Chaos, Worker

SICK, NUM_STEPS, SECONDS = 1, 3, 60
TEXTS = {  # with rounds every few steps
    "localsgd": "LocalSGD(sync_every=2)",
    "diloco": "DiLoCo(sync_every=2)",
    "streamingdiloco": "StreamingDiLoCo(sync_every=4, fragments=2, delay=1)",
    "eagerdiloco": "EagerDiLoCo(sync_every=2)",
    "muloco": "MuLoCo(sync_every=2)",
    "isoloco": "IsoLoCo(sync_every=2)",
    "sparseloco": "SparseLoCo(sync_every=2)",
    "pulseloco": "PULSELoCo(sync_every=2)",
    "slowmo": "SlowMo(sync_every=2)",
    "noloco": "NoLoCo(sync_every=2)",
    "gasloc": "GASLoC(sync_every=2)",
    "wagma": "WAGMA(sync_period=2)",
}
BOUNDED = [("sgp", {}), ("sgp", {"overlap": True}), ("dpsgd", {}), ("adpsgd", {})]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name, method in METHODS.items() if not method.needs_fixed_ranks),
    ("wagma", {"overlap": True}),
    *((name, {"overlap": True}) for name in ("dpsgd", "choco", "sparta")),
    ("sgp", {"overlap": True, "max_staleness": 2}),
    ("sgp", {"overlap": True, "schedule": "Schedule(average_every=4)"}),
    ("sgp", {"overlap": True, "wire_dtype": "bfloat16"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_only_the_worker_with_nan_gets_an_error(name: str, options: dict[str, Any]) -> None:
    is_over = threading.Event()

    def body(worker: Worker) -> str:
        member = worker.membership(min_workers=3, timeout=SECONDS, min_deadline=20.0)
        model = nn.Linear(4, 2)
        wrapper = wrap(TEXTS.get(name, name), model, WrapperOptions(**options), Context(membership=member))
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01, momentum=0.9)
        is_sick, num_after = member.rank == SICK, 0
        try:
            for step in member.steps(1 << 30):
                if is_sick and step >= 5:  # a late worker may leave out steps
                    with torch.no_grad():
                        model.weight.fill_(float("nan"))
                wrapper(torch.ones(1, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                num_after += is_over.is_set()
                if num_after > NUM_STEPS:
                    break
        except FloatingPointError as error:
            return str(error)
        finally:
            wrapper.close()
            if is_sick:
                is_over.set()
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        return "trained on"

    results = sorted(Chaos().run(body, 3).values())
    assert results[1:] == ["trained on"] * 2
    assert "its own model holds infinities" in results[0] or "the model holds infinities" in results[0]


@pytest.mark.parametrize(("name", "options"), BOUNDED, ids=str)
def test_a_far_model_changes_no_other_worker(name: str, options: dict[str, Any]) -> None:
    """One worker has a model of huge finite numbers, which the others refuse by their bound."""
    is_over = threading.Event()

    def body(worker: Worker) -> float:
        member = worker.membership(min_workers=3, timeout=SECONDS, min_deadline=20.0)
        model = nn.Linear(4, 2)
        make: Any = BilatGossipDataParallel if name == "adpsgd" else GossipDataParallel
        settings = {} if name == "adpsgd" else {"push_sum": name == "sgp", **options}
        wrapper = make(model, membership=member, max_relative_distance=0.5, **settings)
        is_sick, is_refused, num_after = member.rank == SICK, False, 0
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.0)
        for step in member.steps(1 << 30):
            if is_sick and step >= 5:
                with torch.no_grad():
                    model.weight.fill_(1e30)
            wrapper(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            is_refused |= any(key.startswith("num_refused/") for key in wrapper.comm_stats())
            if is_refused and not is_sick:
                is_over.set()
            num_after += is_over.is_set()
            if num_after > NUM_STEPS:
                break
        largest = float(model.weight.detach().abs().max())
        wrapper.close()
        return largest

    results = sorted(Chaos().run(body, 3).values())
    assert all(largest < 1 for largest in results[:2])
    assert results[2] > 1e29
