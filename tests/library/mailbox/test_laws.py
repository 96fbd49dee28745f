"""Workers in time have the laws of each method: equal bits, those of Gloo, and those of a dense oracle."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    QSGD,
    RDA,
    AllReduceDataParallel,
    Choco,
    ClippedGossip,
    DeepSqueeze,
    DiLoCo,
    GASLoC,
    GossipDataParallel,
    GroupAverageDataParallel,
    IsoLoCo,
    LocalSGD,
    Moniqua,
    MuLoCo,
    NoLoCo,
    RingGraph,
    Schedule,
    SignNorm,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
    TopK,
    TrimmedMean,
)
from gossip_modules.extend import Algorithm, PushPull
from gossip_modules.graph_manager import CompleteGraph, HypercubeGraph
from gossip_modules.registry import METHODS
from tests.harness.mailbox import MailRun, MailWorker, equal, steps
from tests.harness.problems import loss_of, net, sgd
from tests.harness.progress import engine_of
from tests.harness.ranks import run_ranks

NAMES_BUT_FIRST = [name for name, _ in net().named_children() if name != "first"]
CODE = QSGD(4, bucket_size=8, unbiased=True)
METHOD_OPTIONS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "diloco": lambda: {"algorithm": DiLoCo(3)},
    "diloco-adam": lambda: {"algorithm": DiLoCo(3, optimizer=lambda p: torch.optim.Adam(p, lr=0.05))},
    "diloco-tokens": lambda: {"algorithm": DiLoCo(3, weighted_by="tokens")},
    "diloco-compressed": lambda: {"algorithm": DiLoCo(3, compressor=CODE)},
    "diloco-compressed-tokens": lambda: {"algorithm": DiLoCo(3, compressor=CODE, weighted_by="tokens")},
    "diloco-steps": lambda: {"algorithm": DiLoCo(3, weighted_by="num_steps")},
    "diloco-rda": lambda: {"algorithm": DiLoCo(3, merge=RDA())},
    "diloco-rda-tokens": lambda: {"algorithm": DiLoCo(3, merge=RDA(), weighted_by="num_tokens")},
    "diloco-own-weight": lambda: {"algorithm": DiLoCo(3, own_weight=0.25)},
    "diloco-host": lambda: {"algorithm": DiLoCo(3, anchor_device="cpu")},
    "muloco": lambda: {"algorithm": MuLoCo(3)},
    "isoloco": lambda: {"algorithm": IsoLoCo(3)},
    "streaming-blend": lambda: {"algorithm": StreamingDiLoCo(4, fragments=2, delay=2)},
    "streaming-carry": lambda: {"algorithm": StreamingDiLoCo(4, fragments=2, delay=2, arrival="carry")},
    "streaming-adaptive": lambda: {"algorithm": StreamingDiLoCo(4, fragments=2, delay=1, arrival="adaptive")},
    "streaming-names": lambda: {
        "algorithm": StreamingDiLoCo(4, fragments=[["first"], NAMES_BUT_FIRST], delay=1, compressor=CODE)
    },
    "sparseloco": lambda: {"algorithm": SparseLoCo(3, compressor=TopK(0.25))},
    "localsgd": lambda: {"algorithm": LocalSGD(3)},
    "localsgd-delay": lambda: {"algorithm": LocalSGD(3, delay=1)},
    "slowmo": lambda: {"algorithm": SlowMo(3)},
    "slowmo-rate": lambda: {"algorithm": SlowMo(3, inner_lr="optimizer")},
    "slowmo-gossip": lambda: {"algorithm": SlowMo(4, gossip_every=2), "push_sum": False},
    "noloco": lambda: {"algorithm": NoLoCo(3)},
    "noloco-delay": lambda: {"algorithm": NoLoCo(3, delay=1, own_weight=0.25)},
    "gasloc": lambda: {"algorithm": GASLoC(3)},
    "gasloc-graph": lambda: {
        "algorithm": GASLoC(3),
        "graph": lambda n: CompleteGraph(n, peers_per_itr=max(n - 1, 1)),
    },
    "dpsgd": lambda: {"push_sum": False, "schedule": 2},
}
"""The arguments of the wrapper for methods with settings, by name; the others follow from the registry."""


def from_registry(name: str) -> dict[str, Any]:
    """The arguments for a method with its default settings, and a round at every third step."""
    make: Any = METHODS[name].make
    given = {
        "choco": lambda: Choco(SignNorm(), step_size=0.45),
        "deepsqueeze": lambda: DeepSqueeze(SignNorm(), step_size=0.01),
        "clippedgossip": lambda: ClippedGossip(0.5),
        "trimmedmean": lambda: TrimmedMean(0.3),
        "moniqua": lambda: Moniqua(theta=0.5),
    }
    if "sync_every" in inspect.signature(make).parameters:
        return {"algorithm": make(sync_every=3)}
    return {"algorithm": given.get(name, make)(), "schedule": 3}


ALGORITHMS = [name for name, method in METHODS.items() if method.is_algorithm]
REFUSED = {
    "choco",
    "d2",
    "decentlam",
    "eagerdiloco",
    "exactdiffusion",
    "extra",
    "gradienttracking",
    "kgt",
    "powergossip",
    "proxskip",
    "qgdsgdm",
    "relaysgd",
}
"""The methods of the registry that keep a state of links or of steps; all others take a mailbox."""


def options_of(name: str) -> dict[str, Any]:
    return METHOD_OPTIONS[name]() if name in METHOD_OPTIONS else from_registry(name)


def averages(options: Mapping[str, Any]) -> bool:
    """Whether all workers share an anchor."""
    algorithm = options.get("algorithm")
    return isinstance(algorithm, Algorithm) and algorithm.has_equal_memory


NUM_STEPS = 13


def trained(wrapper: GossipDataParallel, rank: int, loop: Callable[..., None], num_steps: int = NUM_STEPS) -> Tensor:
    """The models of a worker in its forwards, [num_steps + 1, d]."""
    models: list[Tensor] = []

    def note(*_: object) -> None:
        models.append(parts_of(wrapper.module))

    def loss(step: int) -> Tensor:
        with wrapper.module.register_forward_pre_hook(note):
            value = loss_of(wrapper, rank, step)
        if engine_of(wrapper).rounds is not None and engine_of(wrapper).rounds.algorithm.counts_tokens:
            wrapper.count_tokens(5 + 2 * rank)
        return value

    loop(sgd(wrapper.module), loss, num_steps)
    return torch.stack(models)


def by_mail(options: Callable[[], dict[str, Any]], num_workers: int, make: Callable[[], nn.Module] = net) -> Tensor:
    """The models of all workers by mail, [n, num_steps + 1, d]."""

    def body(worker: MailWorker) -> Tensor:
        wrapper = worker.wrap(make(), **options())
        return trained(wrapper, worker.number, lambda *rest: steps(worker, *rest))

    return torch.stack(MailRun().train(num_workers, body))


def by_gloo(options: Callable[[], dict[str, Any]], num_ranks: int, make: Callable[[], nn.Module] = net) -> Tensor:
    """The models of all ranks of a group of Gloo, [n, num_steps + 1, d]."""

    def loop(optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor], num_steps: int) -> None:
        for step in range(num_steps + 1):
            value = loss(step)
            if step < num_steps:
                optimizer.zero_grad()
                value.backward()
                optimizer.step()

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = GossipDataParallel(make(), process_group=group, **options())
        result = trained(wrapper, group.rank(), loop)
        wrapper.close()
        return result

    return torch.stack(run_ranks(num_ranks, body))


ACCEPTED = [*METHOD_OPTIONS, *(name for name in ALGORITHMS if name not in REFUSED and name not in METHOD_OPTIONS)]


def double_net() -> nn.Module:
    return net().double()


@pytest.mark.parametrize("name", ACCEPTED)
def test_two_workers_have_the_bits_of_two_ranks_of_gloo(name: str) -> None:
    found, expected = (run(lambda: options_of(name), 2) for run in (by_mail, by_gloo))
    assert torch.equal(found, expected)
    assert not torch.equal(found[:, 0], found[:, -1])


@pytest.mark.parametrize("name", ACCEPTED)
def test_three_workers_are_ranks_of_gloo_up_to_rounding(name: str) -> None:
    found, expected = (run(lambda: options_of(name), 3, double_net) for run in (by_mail, by_gloo))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class TwoTypes(nn.Module):
    """Layers of float32, float64 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3).double()
        self.third = nn.Linear(3, 2).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).double()).bfloat16()).float()


class ComplexNumbers(nn.Module):
    """A layer of complex numbers between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.ParameterList([torch.randn(4, 2, dtype=torch.complex64)])

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x).to(torch.complex64) @ self.second[0]).abs()


def partly_frozen() -> nn.Module:
    model = net()
    model.get_submodule("first").requires_grad_(False)
    return model


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Equal models on all workers: copies, since workers are threads, which share the generator that draws a model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    return lambda: copy.deepcopy(model)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "float32": net,
    "float64": double_net,
    "bfloat16": lambda: net().bfloat16(),
    "types": seeded(TwoTypes),
    "complex": seeded(ComplexNumbers),
    "frozen": partly_frozen,
}
SHARED = ("diloco", "diloco-rda", "diloco-compressed", "streaming-carry", "sparseloco", "localsgd", "slowmo")


def parts_of(model: nn.Module) -> Tensor:
    """All trained numbers, as float64 [d]."""
    tensors = [*(p for p in model.parameters()), *(b for b in model.buffers() if b.is_floating_point())]
    real = [torch.view_as_real(x.detach()) if x.is_complex() else x.detach() for x in tensors]
    return torch.cat([x.double().flatten() for x in real])


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("kind", MODELS)
def test_workers_have_equal_bits_after_each_outer_step(kind: str, name: str) -> None:
    """With each kind of model; and two of them have the bits of ranks of Gloo."""
    every = 4 if name.startswith("streaming") else 3
    found = by_mail(lambda: options_of(name), 2, MODELS[kind])
    assert torch.equal(found, by_gloo(lambda: options_of(name), 2, MODELS[kind]))
    found = by_mail(lambda: options_of(name), 3, MODELS[kind])
    assert not equal(list(found[:, every - 1]))
    if name.startswith("streaming"):
        return  # fragments are equal at different steps, and carried steps stay apart
    for step in range(every, NUM_STEPS, every):
        assert equal(list(found[:, step])), step
    assert not torch.equal(found[0, 0], found[0, -1])


def refused(match: str, wrap: Callable[..., Any] = GossipDataParallel, **options: Any) -> None:
    """The options are refused, before the worker asks its store for anything, with got, expected and remedy."""
    run = MailRun()
    worker = MailWorker(run, min_workers=1)
    with pytest.raises(ValueError, match=rf"(?s)^got .*expected .*{match}"):
        wrap(net(), membership=worker.membership, **options)
    assert worker.medium.inner.list() == {}
    worker.membership.release()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_methods_with_a_state_of_links_or_steps_are_refused(name: str) -> None:
    options = options_of(name)
    needs_each_step = METHODS[name].needs_sgd  # which no membership lets run with a schedule
    remedy = "take D2, Exact" if needs_each_step else "take DiLoCo, MuLoCo, IsoLoCo, SparseLoCo, SlowMo, LocalSGD, N"
    refused(remedy, **options)


@pytest.mark.parametrize("name", ["qgdsgdm", "decentlam"])
def test_methods_that_change_each_step_are_refused_without_a_schedule_too(name: str) -> None:
    refused("take DiLoCo, MuLoCo", **{**options_of(name), "schedule": 1})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"algorithm": DiLoCo(3), "overlap": True}, "leave them out"),
        ({"algorithm": DiLoCo(3), "nprocs_per_node": 2}, "leave them out"),
        ({"algorithm": DiLoCo(3), "init_sync": False}, "leave init_sync out"),
        ({"algorithm": DiLoCo(3), "comm_device": "cuda"}, "or None; leave comm_device out"),
        ({"algorithm": DiLoCo(3), "timeout": 7.0}, r"pass it to Membership\(..., timeout=...\)"),
        ({"algorithm": DiLoCo(3), "rounds": "step"}, "leave rounds out"),
        ({"algorithm": DiLoCo(3), "rounds": "manual"}, "leave rounds out"),
        ({"algorithm": DiLoCo(3), "schedule": Schedule(average_every=2)}, r"take LocalSGD\(sync_every=H\)"),
        ({"push_sum": False, "schedule": Schedule(2, average_every=2)}, r"take LocalSGD\(sync_every=H\)"),
        ({"push_sum": False, "schedule": 2, "wire_dtype": torch.bfloat16}, "leave wire_dtype out"),
        ({"algorithm": PushPull(), "schedule": 2, "push_sum": False}, "leave wire_dtype out"),
        ({"push_sum": False}, "pass schedule=H, or sync_every=H"),
        ({}, "pass schedule=H, or sync_every=H"),
        ({"algorithm": DiLoCo(1)}, "pass schedule=H, or sync_every=H"),
        ({"algorithm": SlowMo(4, gossip_every=1)}, "pass schedule=H, or sync_every=H"),
        ({"algorithm": DiLoCo(3, delay="auto")}, "pass delay=1"),
        ({"algorithm": GASLoC(3, momentum=0.0).over(Choco(SignNorm(), step_size=0.4))}, "take DiLoCo"),
        ({"algorithm": GASLoC(3), "graph": RingGraph(4, peers_per_itr=2)}, "made anew for each number"),
        ({"algorithm": NoLoCo(3), "graph": HypercubeGraph}, "e.g. RingGraph"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], match: str) -> None:
    refused(match, **options)


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        (AllReduceDataParallel, {}),
        (GroupAverageDataParallel, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrappers_with_a_message_per_step_are_refused(wrap: Callable[..., Any], options: dict[str, Any]) -> None:
    refused(r"GossipDataParallel\(model, algorithm=DiLoCo\(sync_every=H\), membership=", wrap, **options)
