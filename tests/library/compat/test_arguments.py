"""Arguments of other libraries: accepted with a warning, replaced, or refused with what takes their place."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossip_modules as gm
from gossip_modules.compat.actions import Foreign, ForeignArguments, Ignored, NewName, Refused
from gossip_modules.compat.moved import REMOVED
from gossip_modules.compat.tables import ARGUMENTS, DDP_ARGUMENTS
from gossip_modules.extend import LockstepEngine, OverlapEngine, PushPull, SyncEngine
from gossip_modules.mixing_manager import UniformMixing
from gossip_modules.old_names import takes_old_arguments
from tests.harness.progress import engine_of
from tests.harness.ranks import solo_group


class Client:
    """It says what it was given."""

    @takes_old_arguments()
    def __init__(self, module: int, *, timeout: float = 1.0, group: str = "") -> None:
        self.given = (module, timeout, group)


@takes_old_arguments(passed_on_to=Client)
def connect(module: int, **options: Any) -> Client:
    """A function that passes arguments on."""
    return Client(module, **options)


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old arguments of both."""
    old: ForeignArguments = {
        "size": Ignored("there are no buckets"),
        "wait": NewName("timeout"),
        "mesh": Refused("there is no mesh; pass group="),
        "late": lambda value, given: NewName("timeout") if given["module"] == 2 else Refused("not now"),
    }
    monkeypatch.setitem(ARGUMENTS, "Client.__init__", Foreign(old))
    monkeypatch.setitem(ARGUMENTS, "connect", Foreign({"wait": Refused("call connect() again")}))


def test_own_arguments_pass_without_a_word() -> None:
    assert Client(1, timeout=2.0, group="a").given == connect(module=1, timeout=2.0, group="a").given == (1, 2.0, "a")
    assert [*inspect.signature(Client).parameters] == ["module", "timeout", "group"]


def test_an_argument_that_changes_nothing_is_accepted_with_a_warning() -> None:
    match = r"^got size=3 for Client, which changes nothing: there are no buckets; leave it out$"
    with pytest.warns(UserWarning, match=match) as caught:
        assert Client(1, size=3, timeout=2.0).given == (1, 2.0, "")  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    assert len(caught) == 1


def test_none_says_nothing() -> None:
    assert Client(1, size=None, wait=None, mesh=None).given == (1, 1.0, "")  # type: ignore[call-arg]


def test_an_old_name_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"^got wait=3.0 for Client, which is now timeout=3.0; the old name"):
        assert Client(1, wait=3.0).given == (1, 3.0, "")  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"^got late=3.0 for Client, which is now timeout=3.0; the old name"):
        assert Client(module=2, late=3.0).given == (2, 3.0, "")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^got wait=3.0 and timeout=2.0, expected the second alone$"):
        Client(1, wait=3.0, timeout=2.0)  # type: ignore[call-arg]


def test_a_refused_argument_names_its_replacement() -> None:
    with pytest.raises(ValueError, match=r"^got mesh='x+\.\.\.x+', expected none: there is no mesh; pass group=$"):
        Client(1, mesh="x" * 1000)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^got wait=1, expected none: call connect\(\) again$"):
        connect(1, wait=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Client(1, timout=2.0),  # type: ignore[call-arg]
            r"^Client\(\) got an unexpected keyword argument 'timout'; did you mean 'timeout'\?$",
        ),
        (
            lambda: connect(1, zzz=2.0),
            r"^connect\(\) got an unexpected keyword argument 'zzz'; expected one of group, module, timeout$",
        ),
        (
            lambda: Client(1, 2.0),  # type: ignore[call-arg]
            r"^Client\(\) got 2 positional arguments, expected 1; write Client\(module\), and give the others by name",
        ),
        (lambda: Client(), r"missing 1 required positional argument: 'module'"),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_argument_is_a_type_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


# DistributedDataParallel's arguments at every wrapper.


def pairwise(module: nn.Module, **options: Any) -> gm.PairwiseDataParallel:
    return gm.PairwiseDataParallel(module, name="w0", peers={"w0": "tcp://127.0.0.1:*"}, **options)


def with_group(wrap: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, **options: wrap(module, process_group=solo_group(), **options)


WRAPPERS: dict[str, Callable[..., Any]] = {
    "SGP": with_group(gm.GossipDataParallel),
    "gossip()": with_group(gm.gossip),
    "AD-PSGD": with_group(gm.BilatGossipDataParallel),
    "WAGMA": with_group(gm.GroupAverageDataParallel),
    "dpwa": pairwise,
}
IGNORED: dict[str, Any] = {
    "dim": 0,
    "broadcast_buffers": True,
    "forward_sync_buffers": True,
    "bucket_cap_mb": 25,
    "bucket_cap_mb_list": [25],
    "gradient_as_bucket_view": True,
    "batched_grad_copy": True,
    "find_unused_parameters": True,
    "skip_all_reduce_unused_params": True,
    "static_graph": True,
    "check_reduction": True,
    "delay_all_reduce_named_params": [("weight", nn.Parameter())],
    "param_to_hook_all_reduce": nn.Parameter(),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "device_ids": ([0], r"\(cpu here\); call module.to\(device\) before wrapping"),
    "output_device": (0, r"\(cpu here\); call module.to\(device\) before wrapping"),
    "broadcast_buffers": (False, r"write gossip_buffers=False"),
    "forward_sync_buffers": (False, r"write gossip_buffers=False"),
    "mixed_precision": ("bf16", r"torch.autocast around the forward, and pass wire_dtype=torch.bfloat16"),
}


def test_the_table_has_all_arguments_of_the_installed_torch() -> None:
    ours = {*inspect.signature(gm.GossipDataParallel).parameters, *DDP_ARGUMENTS, "self"}
    assert {*inspect.signature(DistributedDataParallel.__init__).parameters} <= ours
    assert {*IGNORED, *REFUSED} == {*DDP_ARGUMENTS}


@pytest.mark.parametrize("name", WRAPPERS)
def test_arguments_without_effect_are_accepted_with_one_warning_each(name: str) -> None:
    options = dict(IGNORED)
    if name in ("SGP", "gossip()"):
        del options["find_unused_parameters"]  # it has that of its own, for nodes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = WRAPPERS[name](nn.Linear(2, 1), **options)
    model.close()
    messages = [str(one.message) for one in caught]
    assert len(messages) == len(options)
    for option, message in zip(options, messages, strict=True):
        assert message.startswith(f"got {option}=")
        assert "which changes nothing: " in message
    assert {one.filename for one in caught} == {__file__}


@pytest.mark.parametrize("option", REFUSED)
@pytest.mark.parametrize("name", WRAPPERS)
def test_arguments_with_another_place_are_refused_with_the_remedy(name: str, option: str) -> None:
    value, remedy = REFUSED[option]
    module = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=rf"^got {option}=.*, expected none: .*{remedy}"):
        WRAPPERS[name](module, **{option: value})
    assert type(module) is nn.Linear


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_unknown_argument_suggests_the_nearest_name(name: str) -> None:
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'gossip_bufers'; did you mean 'gossip_bu"):
        WRAPPERS[name](nn.Linear(2, 1), gossip_bufers=False)


def test_arguments_in_the_order_of_ddp_are_told_to_have_names() -> None:
    with pytest.raises(TypeError, match=r"^GossipDataParallel\(\) got 2 positional arguments, expected 1; write"):
        gm.GossipDataParallel(nn.Linear(2, 1), [0])  # type: ignore[call-arg]


def test_dpwa_has_no_group() -> None:
    for option in ({"process_group": dist.GroupMember.WORLD or "gloo"}, {"init_sync": True}):
        with pytest.raises(ValueError, match=r"workers find each other by address; pass peers=|init_from_peers=False"):
            pairwise(nn.Linear(2, 1), **option)


def test_all_reduce_takes_the_arguments_of_ddp() -> None:
    model = with_group(gm.AllReduceDataParallel)(nn.Linear(2, 1), gradient_as_bucket_view=True, static_graph=True)
    assert model.gradient_as_bucket_view
    assert model.static_graph
    model.close()
    with pytest.raises(TypeError, match=r"'static_grap'; did you mean 'static_graph'\?"):
        with_group(gm.AllReduceDataParallel)(nn.Linear(2, 1), static_grap=True)
    with pytest.raises(ValueError, match=r"got gossip_buffers=False, expected none: .* write broadcast_buffers=False"):
        with_group(gm.AllReduceDataParallel)(nn.Linear(2, 1), gossip_buffers=False)
    with pytest.raises(ValueError, match=r"got membership=1, expected a Membership"):
        with_group(gm.AllReduceDataParallel)(nn.Linear(2, 1), membership=1)


@pytest.mark.parametrize("name", REMOVED)
def test_a_name_that_is_gone_says_what_takes_its_place(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(f"got gossip_modules.{name}, which is gone: {REMOVED[name]}")):
        exec(f"from gossip_modules import {name}")
    assert name not in gm.__all__


def test_a_schedule_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="got schedule='often', expected a Schedule, or the number of steps from one"):
        gm.GossipDataParallel(nn.Linear(1, 1), process_group=solo_group(), schedule="often")  # type: ignore[arg-type]


def test_a_checkpoint_of_a_run_with_a_consensus_control_is_refused() -> None:
    model = gm.GossipDataParallel(nn.Linear(1, 1), process_group=solo_group(), push_sum=False)
    engine = engine_of(model)
    with pytest.raises(ValueError, match=r"got the state of a ConsensusControl, which is gone, expected .* SlowMo\("):
        engine.load_state_dict({**engine.state_dict(), "control": {"law": {}, "differences": [], "kept": []}})
    model.close()


@pytest.mark.parametrize("kind", [LockstepEngine, SyncEngine, OverlapEngine])
def test_an_engine_takes_its_mixer_by_the_old_name(kind: Callable[..., LockstepEngine]) -> None:
    mixer = PushPull()
    mixer.bind(UniformMixing(gm.RingGraph(1)), gm.connect(solo_group()))
    with pytest.warns(DeprecationWarning, match=r"^got gossiper=PushPull\(\) for .*Engine, which is now mixer="):
        assert kind(gossiper=mixer, schedule=gm.Schedule()).mixer is mixer
