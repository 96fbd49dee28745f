"""deltas=True: what a link sends of a 16-bit message, and that nothing but the bytes is different."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import DiLoCo, GossipDataParallel, RingGraph
from gossip_modules.extend import FlatVector, PushPull, PushSum
from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from gossip_modules.mixing_manager import MixingManager, UniformMixing
from gossip_modules.rounds.deltas import WHOLE, Changes, Deltas, pack_places, unpack_places
from gossip_modules.wrappers.choices import Choices
from tests.harness.problems import loss_of, mlp, net, sgd
from tests.harness.ranks import run_ranks, solo_group
from tests.library.membership.test_compressed import before, four_three_four, run_gossip
from tests.library.rounds.bound import DIGRAPH, bound, value_of

D = 3001


def words(share: float, largest: int) -> tuple[Tensor, Tensor]:
    """Two messages; `share` of the words differ, by up to `largest` either way."""
    generator = torch.Generator().manual_seed(0)
    last = torch.randn(D, generator=generator).bfloat16().view(torch.int16)
    change = torch.randint(1, largest + 1, (D,), generator=generator)
    change *= 2 * torch.randint(0, 2, (D,), generator=generator) - 1
    return last, (last + change * (torch.rand(D, generator=generator) < share)).to(torch.int16)


@pytest.mark.parametrize(
    ("share", "largest", "bits"),
    [(0, 1, 0), (0.02, 1, 0), (0.02, 1 << 14, 0), (0.3, 1, 2), (0.6, 5, 4), (1, 100, 8), (1, 1 << 15, WHOLE)],
)
def test_changes_give_back_every_bit_in_the_smallest_code(share: float, largest: int, bits: int) -> None:
    last, now = words(share, largest)
    changes = Changes.between(last, now)
    received = last.clone()
    changes.apply(received)
    assert torch.equal(received, now)
    assert changes.bits == bits
    assert changes.num_bytes <= 1.02 * min(2 * D, -(-D * bits // 8) + 3 * len(changes.listed)) + D // 255
    kept = last.clone()
    Changes.between(kept, now, becomes=True)
    assert torch.equal(kept, now)


def test_changes_of_other_numbers_too() -> None:
    """Infinities, NaN and the two zeros are words like others."""
    last = torch.tensor([0.0, 1.0, float("inf"), float("nan"), -1e38, 2.0] * 50, dtype=torch.bfloat16).view(torch.int16)
    now = torch.tensor([-0.0, float("nan"), -1.0, 1.0, 1e38, 2.0] * 50, dtype=torch.bfloat16).view(torch.int16)
    received = last.clone()
    Changes.between(last, now).apply(received)
    assert torch.equal(received, now)


@pytest.mark.parametrize("where", [[], [0], [254], [255], [256, 509, 510, 511, 5000], list(range(600))])
def test_places(where: list[int]) -> None:
    packed = pack_places(torch.tensor(where, dtype=torch.int64))
    assert unpack_places(packed).tolist() == where
    assert packed.numel() <= len(where) + max(where, default=0) // 255


CASES: dict[str, tuple[Callable[..., PushPull], MixingManager]] = {
    "D-PSGD": (PushPull, UniformMixing(RingGraph(4, peers_per_itr=2))),
    "SGP": (PushSum, UniformMixing(NPeerDynamicDirectedExponentialGraph(4))),
    "weights": (PushSum, UniformMixing(DIGRAPH)),
}


@pytest.mark.filterwarnings("ignore:.*deltas=True")  # the weights of a graph that is not regular change all numbers
@pytest.mark.parametrize(
    ("name", "wire"), [("D-PSGD", torch.float16), ("SGP", torch.bfloat16), ("weights", torch.bfloat16)]
)
def test_rounds_have_equal_bits_and_fewer_bytes(name: str, wire: torch.dtype) -> None:
    """Also after the graph has changed, and where a round is applied late; steps change more and more entries."""
    make, mixing = CASES[name]
    other = UniformMixing(NPeerDynamicDirectedExponentialGraph(4, peers_per_itr=2))

    def rounds(group: dist.ProcessGroup, *, deltas: bool) -> tuple[Tensor, int, PushPull]:
        mixer = bound(make(wire_dtype=wire, deltas=deltas), mixing, group)
        x = FlatVector.over(value_of(group.rank(), (2000,), torch.float32))
        generator, seen = torch.Generator().manual_seed(group.rank()), []
        for t in range(30):
            if t == 15:
                mixer.rebind(other if make is PushSum else mixing, mixer.transport)
            x.segments[0].add_(torch.randn(2000, generator=generator), alpha=1e-6 * 1.4**t)
            if t % 3:
                s = x.clone()
                mixer.start(s, t)
                x.add_(s, alpha=mixer.difference(s))
            else:
                mixer.mix(x, t)
            seen.append(torch.cat([x.segments[0], x.push_sum_weight.float()]))
        return torch.stack(seen), mixer.transport.num_bytes_sent, mixer

    def body(group: dist.ProcessGroup) -> None:
        (plain, whole, _), (coded, fewer, mixer) = (rounds(group, deltas=deltas) for deltas in (False, True))
        assert torch.equal(plain, coded)
        assert fewer < (1.1 if name == "weights" else 0.75) * whole
        links = mixer._network
        assert isinstance(links, Deltas)
        if name == "D-PSGD":  # one copy for all out-peers, and the inbox is the copy of an in-peer
            assert len({id(link.words) for link in links.outgoing.values()}) == 1
            assert {link.words.data_ptr() for link in links.incoming.values() if link.words is not None} == {
                vector.raw.data_ptr() for vector in mixer.received
            }

    run_ranks(4, body)


def test_workers_that_die_and_join_have_equal_bits() -> None:
    layout = FlatVector.over(torch.zeros(700)).layout
    plain, coded = (
        run_gossip(four_three_four(before, last=14), partial(PushPull, wire_dtype=torch.bfloat16, deltas=d), layout)
        for d in (False, True)
    )
    for one, two in zip(plain, coded, strict=True):
        assert one.seen.keys() == two.seen.keys()
        assert all(torch.equal(one.seen[t], two.seen[t]) for t in one.seen)


def two_dtypes(seed: int) -> nn.Module:
    """`net`, whose batch norm has buffers, with its last layer in bfloat16."""
    model = net(seed)
    last: Any = model.second
    last.bfloat16()
    last.register_forward_pre_hook(lambda _, args: args[0].bfloat16())
    last.register_forward_hook(lambda *args: args[2].float())
    return model


@pytest.mark.parametrize(
    ("options", "make"),
    [({"push_sum": False}, mlp), ({"overlap": True}, mlp), ({"gossip_buffers": True}, two_dtypes)],
    ids=["D-PSGD", "overlap", "two dtypes and buffers"],
)
def test_training_has_equal_bits_also_from_a_checkpoint(
    options: dict[str, Any], make: Callable[[int], nn.Module]
) -> None:
    def train(group: dist.ProcessGroup, *, deltas: bool) -> list[Tensor]:
        seen, saved = [], None
        for part in range(2):
            model = make(group.rank())
            given = {"graph": RingGraph(3, peers_per_itr=2), "process_group": group, **options}
            wrapper = GossipDataParallel(model, wire_dtype=torch.bfloat16, deltas=deltas, **given)
            if saved is not None:
                wrapper.load_state_dict(saved)
            optimizer = sgd(model)
            for step in range(6):
                optimizer.zero_grad()
                loss_of(wrapper, group.rank(), 6 * part + step).backward()
                optimizer.step()
                state = model.state_dict().values()
                seen.append(torch.cat([x.detach().flatten().double() for x in state]))
            saved = copy.deepcopy(wrapper.state_dict())
            wrapper.close()
        return seen

    def body(group: dist.ProcessGroup) -> None:
        plain, coded = (torch.stack(train(group, deltas=deltas)) for deltas in (False, True))
        assert torch.equal(plain, coded)

    run_ranks(3, body)


def test_a_warning_says_that_nothing_is_saved() -> None:
    def body(group: dist.ProcessGroup) -> None:
        mixer = bound(PushPull(wire_dtype=torch.bfloat16, deltas=True), UniformMixing(RingGraph(2)), group)
        for t in range(20):
            mixer.mix(value_of(20 * group.rank() + t, (3000,)), t)

    with pytest.warns(
        UserWarning, match=r"deltas=True\): the last 16 messages had 10\d% of .* leave deltas out"
    ) as seen:
        run_ranks(2, body)
    assert len(seen) == 2  # once on each rank


def test_a_message_on_another_one_is_refused() -> None:
    """As from a rank that has begun anew alone; the next round does not go on either."""

    def body(group: dist.ProcessGroup) -> None:
        mixer = bound(PushPull(wire_dtype=torch.bfloat16, deltas=True), UniformMixing(RingGraph(2)), group)
        x = FlatVector.over(value_of(group.rank(), (100,)))
        mixer.mix(x, 0)
        links = mixer._network
        assert isinstance(links, Deltas)
        links.incoming[1 - group.rank()].number += 1
        with pytest.raises(
            RuntimeError, match=r"rank . sent changes since its message 1, the last one here is 2; make"
        ):
            mixer.mix(x, 1)
        with pytest.raises(RuntimeError, match=r"an earlier round of PushPull\(.*deltas=True\) ended with an error"):
            mixer.mix(x, 2)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, r'without a dtype of 16 bits \(wire_dtype=None, or "auto"'),
        ({"wire_dtype": "auto", "overlap": "auto"}, "without a dtype of 16 bits"),
        ({"wire_dtype": torch.int8}, r"without a dtype of 16 bits \(wire_dtype=torch.int8\), expected one"),
        ({"wire_dtype": torch.bfloat16, "algorithm": "d2", "push_sum": False}, r"got deltas=True with D2\("),
        ({"algorithm": PushPull(wire_dtype=torch.bfloat16), "push_sum": False}, "got deltas=True beside PushPull"),
        ({"wire_dtype": torch.bfloat16, "algorithm": DiLoCo()}, "got wire_dtype beside"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        GossipDataParallel(mlp(), process_group=solo_group(), deltas=True, **options)


@pytest.mark.parametrize("choices", [{}, {"algorithm": PushSum(wire_dtype=torch.bfloat16, deltas=True)}])
def test_shards_of_a_membership_take_no_deltas(choices: dict[str, Any]) -> None:
    chosen = Choices(**(choices or {"wire_dtype": torch.bfloat16, "deltas": True}))
    place: dict[str, Any] = {"overlap": False, "init_sync": True, "nprocs_per_node": 1, "has_membership": True}
    chosen.check(**place)
    with pytest.raises(ValueError, match="got deltas=True with a membership and a module that is sharded"):
        chosen.check(is_sharded=True, **place)
