"""On a GPU: ranks that share one card talk over Gloo through pinned memory. NCCL has tests of its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    Choco,
    DeepSqueeze,
    DiLoCo,
    GASLoC,
    GossipDataParallel,
    Moniqua,
    PowerGossip,
    RingGraph,
    SignNorm,
    StreamingDiLoCo,
    TopK,
    connect,
)
from gossip_modules.extend import Algorithm, FlatBuffer, FlatVector, OuterMethod, PushPull
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.rounds import Rounds
from tests.harness.problems import adamw, fill_, mlp, net, sgd, train_step
from tests.harness.ranks import TIMEOUT, run_ranks
from tests.harness.reference import Snapshot, flatten
from tests.library.algorithms.contract import vector_of
from tests.library.rounds.memories import drivers_of
from tests.library.wrappers.test_oracle import FixedStaleness, assert_equal, irregular_digraph, oracle, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 2e-6  # GPU kernels sum in another order than the CPU's
STEPS = 7
MODES: list[tuple[Any, dict[str, Any]]] = [
    (GossipDataParallel, {}),
    (GossipDataParallel, {"overlap": True}),
    (FixedStaleness, {"overlap": True, "max_staleness": 2}),
]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("make", "options"), MODES, ids=str)
def test_ranks_on_one_card_equal_the_cpu_oracle(make: Any, options: dict[str, Any], n: int) -> None:
    """Two ranks: doubly stochastic. Three: an irregular digraph, whose weight travels too."""
    graph = irregular_digraph(n)

    def body(group: dist.ProcessGroup) -> list[Snapshot]:
        return [
            run(group, make, optimizer, STEPS, device="cuda", comm_device="cpu", graph=graph, **options)
            for optimizer in (sgd, adamw)
        ]

    ranks = run_ranks(n, body)
    for i, optimizer in enumerate((sgd, adamw)):
        assert_equal([rank[i] for rank in ranks], oracle(graph, optimizer, STEPS, **options), TOLERANCE)


def train_large(group: dist.ProcessGroup, device: str, overlap: bool) -> Tensor:
    """A model whose messages take long enough for streams to matter: what is left after some steps."""
    layers = [fill_(nn.Linear(512, 512), group.rank() + i) for i in range(8)]
    model = nn.Sequential(*layers).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.05)
    wrapper = GossipDataParallel(model, overlap=overlap, comm_device="cpu", init_sync=False, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(group.rank())).to(device)
    for _ in range(6):
        optimizer.zero_grad()
        wrapper(x).square().mean().backward()
        optimizer.step()
    wrapper.close()
    return flatten(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_streams_do_not_race(overlap: bool) -> None:
    """Large messages give the result of the CPU, where nothing is asynchronous but the gossip thread."""
    on_gpu = run_ranks(2, lambda group: train_large(group, "cuda", overlap))
    on_cpu = run_ranks(2, lambda group: train_large(group, "cpu", overlap))
    for got, want in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_state_average_and_copies_on_the_card() -> None:
    def body(group: dist.ProcessGroup) -> None:
        graph = irregular_digraph(3)
        options: dict[str, Any] = {"graph": graph, "overlap": True, "init_sync": False, "process_group": group}
        wrapper = GossipDataParallel(net(group.rank()).cuda(), comm_device="cpu", **options)
        optimizer = sgd(wrapper)
        for step in range(3):
            train_step(wrapper, optimizer, group.rank(), step)
        resumed = GossipDataParallel(net(9).cuda(), comm_device="cpu", **options)
        resumed.load_state_dict(wrapper.state_dict())
        twin = copy.deepcopy(wrapper)
        for other in (resumed, twin):
            assert torch.equal(flatten(other.module), flatten(wrapper.module))
            assert other.get_extra_state() == wrapper.get_extra_state()
        before = flatten(wrapper.module)
        assert wrapper.consensus_distance() > 0
        with wrapper.averaged():
            average = flatten(wrapper.module)
        torch.testing.assert_close(flatten(wrapper.module), before, rtol=0, atol=1e-6)
        wrapper.average_()
        torch.testing.assert_close(flatten(wrapper.module), average, rtol=0, atol=1e-6)
        for other in (wrapper, resumed, twin):
            other.close()

    run_ranks(3, body)


COMPRESSED: dict[str, Callable[[], Algorithm]] = {
    "Choco SignNorm": lambda: Choco(SignNorm(64), step_size=0.3),
    "Choco TopK": lambda: Choco(TopK(0.1), step_size=0.3),
    "DeepSqueeze": lambda: DeepSqueeze(TopK(0.1), step_size=0.2),
    "Moniqua": lambda: Moniqua(20.0),
    "PowerGossip": lambda: PowerGossip(rank=2, check_every=1),
}
# Values whose order of magnitude decides (TopK, the levels of Moniqua) are compared and rounded without sums.
CODED = FlatLayout.of(
    [
        (torch.float64, [*map(TensorSpec, [(40, 30), (40, 30), (64, 3, 3, 3), (50,)]), TensorSpec((7,), True)]),
        (torch.float32, [TensorSpec((16, 16)), TensorSpec((9,), True)]),
        (torch.bfloat16, [TensorSpec((8, 16))]),
    ]
)


def gossip_on(name: str, devices: tuple[str, str], num_rounds: int = 4) -> list[list[Tensor]]:
    """Two ranks, each on its device: what they hold after each round, in float64 on the CPU."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        device = torch.device(devices[group.rank()])
        mixer = Rounds(COMPRESSED[name](), PushPull())
        mixing = MetropolisHastingsMixing(RingGraph(2))
        mixer.bind(mixing, connect(group, module_device=device, comm_device="cpu", timeout=TIMEOUT))
        s = FlatVector(CODED, vector_of(group.rank(), CODED).raw.to(device))
        rounds = []
        for t in range(num_rounds):
            mixer.mix(s, t)
            # Of the values of bfloat16 many are equal in size, so TopK may choose others on the card.
            coded = s.segments[:2] if "TopK" in name or name == "DeepSqueeze" else s.segments
            rounds.append(torch.cat([segment.double().cpu() for segment in coded]))
        return rounds

    return run_ranks(2, body)


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu")], ids=str)
def test_compressed_gossip_on_the_card_equals_the_cpu(name: str, devices: tuple[str, str]) -> None:
    """Also between a card and a CPU: PowerGossip's checksums then prove that both ends hold the same bits."""
    for got, want in zip(gossip_on(name, devices), gossip_on(name, ("cpu", "cpu")), strict=True):
        torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=0, atol=2e-2)  # bfloat16 included
        exact = slice(0, 2400 + 1728 + 57)  # the float64 segment
        torch.testing.assert_close(got[-1][exact], want[-1][exact], rtol=0, atol=1e-6)


def test_power_gossip_multiplies_in_full_precision_on_the_card() -> None:
    """Whatever TF32 and autocast say: no bit changes; and the setting is what it was."""
    before = torch.get_float32_matmul_precision()
    want = gossip_on("PowerGossip", ("cuda", "cuda"))
    try:
        torch.set_float32_matmul_precision("medium")
        got = gossip_on("PowerGossip", ("cuda", "cuda"))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    for one, other in zip(got, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_state_moves_with_the_model(name: str) -> None:
    """From the card to the CPU between two rounds: the memory goes along, with no warning that it is lost."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = GossipDataParallel(
            net(group.rank()).cuda(),
            algorithm=COMPRESSED[name](),
            comm_device="cpu",
            init_sync=False,
            process_group=group,
        )
        for device in ("cuda", "cpu", "cuda"):
            wrapper.to(device)
            optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
            for step in range(2):
                train_step(wrapper, optimizer, group.rank(), step)
        assert wrapper.comm_stats()["num_rounds"] == 6
        assert bool(flatten(wrapper.module).isfinite().all())
        wrapper.close()

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [(0.5,), (0.3,), (0.25, 0.25)], ids=str)
def test_narrow_vectors_are_mixed_on_the_card_as_on_the_cpu(dtype: torch.dtype, weights: tuple[float, ...]) -> None:
    """To the bit: computed in float32, and rounded once."""
    draw = torch.Generator().manual_seed(0)
    x, *messages = (torch.randn(100_003, generator=draw).to(dtype) for _ in range(1 + len(weights)))
    results = []
    for device in ("cpu", "cuda"):
        vector = FlatVector.over(x.to(device, copy=True))
        others = [FlatVector.over(message.to(device)) for message in messages]
        vector.combine_(1 - sum(weights), others, weights)
        vector.push_sum_weight.fill_(1.25)
        vector.divide_by_weight_()
        results.append(vector.segments[0].cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, -0.5, -0.3])
def test_narrow_corrections_are_computed_on_the_card_as_on_the_cpu(dtype: torch.dtype, scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x, message = (torch.randn(100_003, generator=draw).to(dtype) for _ in range(2))
    results = []
    for device in ("cpu", "cuda"):
        vector = FlatVector.over(x.to(device, copy=True))
        vector.combine_(scale, [FlatVector.over(message.to(device))], [0.5])
        results.append(vector.segments[0].cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_vectors_are_divided_by_weights_on_the_card_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(0)).to(dtype).cuda()
    weight = torch.full((1,), 1.3, dtype=torch.float64).cuda()
    vector = FlatVector.over(x.clone())
    vector.multiply_by_weight_(weight)
    want = (x.float() * 1.3).to(dtype)
    assert torch.equal(vector.segments[0], want)
    vector.divide_by_weight_(weight)
    assert torch.equal(vector.segments[0], (want.float() / 1.3).to(dtype))


def test_flat_buffer_moves_to_the_card_and_back() -> None:
    model = net()
    buffer = FlatBuffer(model)
    expected, in_buffer = flatten(model), buffer.vector.segments[0].double()
    for device in ("cuda", "cpu", "cuda"):
        model.to(device)
        assert not buffer.is_attached()
        buffer.attach()
        assert buffer.vector.raw.device.type == device
        assert torch.equal(buffer.vector.segments[0].double().cpu(), in_buffer)
        assert torch.equal(flatten(model), expected)
    assert torch.equal(flatten(pickle.loads(pickle.dumps(model))), expected)  # noqa: S301 (made in this line)
    buffer.vector.segments[0].zero_()
    assert not flatten(model).any()


@pytest.mark.parametrize("fused", [False, True])
def test_fused_optimizers_keep_the_views_on_the_card(fused: bool) -> None:
    model, bare = mlp().cuda(), mlp().cuda()
    buffer = FlatBuffer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    other = torch.optim.AdamW(bare.parameters(), lr=0.1, fused=fused)
    for step in range(3):
        train_step(model, optimizer, 0, step)
        train_step(bare, other, 0, step)
    assert buffer.is_attached()
    assert torch.equal(flatten(model), flatten(bare))
    buffer.vector.segments[0].zero_()
    assert not flatten(model).any()


@pytest.mark.parametrize("algorithm", [DiLoCo(2), StreamingDiLoCo(4, fragments=2, delay=2), GASLoC(3)], ids=str)
def test_anchors_in_host_memory_equal_those_on_the_card(algorithm: OuterMethod) -> None:
    """Also: nothing of them stays on the card, and a checkpoint of either goes on with the other."""

    def body(group: dist.ProcessGroup, place: str | None, then: str | None) -> Tensor:
        model, resumed = net().cuda(), net(5).cuda()
        options: dict[str, Any] = {"comm_device": "cpu", "process_group": group}
        wrapper = GossipDataParallel(model, algorithm=replace(algorithm, anchor_device=place), **options)
        optimizer = sgd(model)
        for step in range(9):
            train_step(wrapper, optimizer, group.rank(), step)
        state = wrapper.state_dict()
        memories = [driver.memory for driver in drivers_of(wrapper)]
        vectors = [part for memory in memories for entry in memory.entries.values() for part in entry.vector.parts]
        optimizers = [entry.optimizer for memory in memories for entry in memory.optimizers.values()]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        moments = [x for state in states for x in state.values() if torch.is_tensor(x)]
        assert {x.device.type for x in (*vectors, *moments) if x.dim()} == {place or "cuda"}
        twin = GossipDataParallel(resumed, algorithm=replace(algorithm, anchor_device=then), **options)
        twin.load_state_dict(state)
        wrapper.close()
        other = sgd(resumed)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(9, 15):
            train_step(twin, other, group.rank(), step)
        twin.flush()
        twin.close()
        return flatten(resumed).cpu()

    expected, *others = (
        run_ranks(2, lambda group, places=places: body(group, *places))  # type: ignore[misc]
        for places in ((None, None), ("cpu", "cpu"), ("cpu", None), (None, "cpu"))
    )
    for found in others:
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=TOLERANCE)
