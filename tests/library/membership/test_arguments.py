"""Arguments of `Membership`, and of a wrapper with one, that do not fit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gossip_modules import Choco, DiLoCo, GossipDataParallel, Membership, RingGraph, SlowMo
from gossip_modules.compression.quantizer import SignNorm
from gossip_modules.graph_manager import BaseGraph, DynamicBipartiteExponentialGraph
from tests.library.membership.test_membership import SECONDS, member_of, model_of


def test_a_store_that_does_not_answer_is_an_error_with_its_address() -> None:
    with pytest.raises(
        ConnectionError, match=r"(?s)127.0.0.1:1 did not answer within 1 s .* -m gossip_modules.membership.serve"
    ):
        Membership("127.0.0.1:1", min_workers=2, timeout=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_workers": 0}, "got min_workers=0, expected a whole number of at least 1"),
        ({"on_partition": "stop"}, "got on_partition='stop', expected 'majority' or 'both'"),
        ({"interval": 0.6}, "got interval=0.6 and min_deadline=1.0, expected seconds"),
        ({"store": "node0"}, "got store='node0', expected 'host:port'"),
        ({"store": "localhost:99999"}, "got store='localhost:99999', expected 'host:port'"),
        *(
            ({"store": store}, f"got store={store}, expected 'host:port'.* a torch.distributed.Store")
            for store in (None, 5)
        ),
        *(
            ({"timeout": timeout}, "got timeout=.*, expected more than zero seconds: a number like 30")
            for timeout in ("60", None, float("nan"), float("inf"), -1, 0, timedelta(0))
        ),
        *(
            ({name: value}, "got interval=.* and min_deadline=.*, expected seconds, the second at least twice")
            for name in ("interval", "min_deadline")
            for value in ("1", None, float("nan"), float("inf"))
        ),
        ({"max_workers": True, "min_workers": 1}, "got max_workers=True and min_workers=1, expected a whole number"),
        ({"max_workers": None}, "got max_workers=None and min_workers=2, expected a whole number"),
        ({"name": None}, "got name=None, expected a string, the same on all workers"),
        ({"name": 3}, "got name=3, expected a string"),
        ({"host": 5}, "got host=5, expected the name or the address of this machine, or None"),
        ({"description": "x"}, "got description='x', expected a dict, like {'data': 'version 3'}"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Membership(**{"store": dist.HashStore(), "min_workers": 2, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": RingGraph(4)}, r"got graph=RingGraph\(4, .* with a membership, expected a class"),
        ({"graph": DynamicBipartiteExponentialGraph}, r"does not exist for \[3, 5, 7, 9, 11, 13, 15\] workers"),
        ({"algorithm": Choco(SignNorm(), step_size=0.4), "graph": BaseGraph}, "got .* a graph that never changes"),
        (
            {"algorithm": SlowMo(gossip_every=1)},
            "got push_sum=True between .*, expected push_sum=False",
        ),
        (
            {"algorithm": DiLoCo(), "graph": RingGraph},
            "got graph beside DiLoCo.*, expected none: it averages over all ranks",
        ),
        ({"comm_device": "cuda"}, "got comm_device=cuda with a membership"),
        ({"init_sync": False}, "got init_sync=False with a membership, expected True: its workers begin"),
        ({"timeout": 7}, "got timeout=7 s with a membership, which has a timeout of 60 s, expected none"),
        ({"membership": "node0:29400"}, r"expected a Membership; pass Membership\('node0:29400', min_workers="),
        ({"membership": 4}, r"got membership=4, expected a Membership; pass Membership\('host:port', min_workers="),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    membership = Membership(dist.HashStore(), min_workers=2)
    with pytest.raises(ValueError, match=message):
        GossipDataParallel(model_of(), **{"membership": membership, **options})
    membership.close()


def test_the_timeout_of_the_membership_may_be_given_again() -> None:
    membership = Membership(dist.HashStore(), min_workers=1, timeout=SECONDS)
    GossipDataParallel(model_of(), membership=membership, timeout=SECONDS, init_sync=True).close()


def test_steps_and_callbacks_are_checked() -> None:
    membership = Membership(dist.HashStore(), min_workers=1)
    for value in ("a", None, True, float("nan")):
        with pytest.raises(ValueError, match=r"got steps\(.*\), expected a number: the training steps"):
            list(membership.steps(value))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got on_change\(5\), expected a function of one argument, a `Change`"):
        membership.on_change(5)  # type: ignore[arg-type]
    membership.close()


def test_a_description_is_compared_as_text() -> None:
    """What founders say is in the log as it is, and in the roster as text."""
    store, wrappers = dist.HashStore(), []
    for _ in range(2):
        membership = member_of(store, min_workers=1, description={"seed": 1})
        wrappers.append(GossipDataParallel(model_of(), membership=membership))
    for wrapper in wrappers:
        wrapper.close()
