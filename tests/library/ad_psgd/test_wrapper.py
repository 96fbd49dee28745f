"""AD-PSGD as a wrapper: no update is lost, and it behaves like the other wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager import DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from tests.harness.problems import adamw, fill_, loss_of, mlp, net, sgd, train_step
from tests.harness.ranks import assert_no_gossip_threads, gossip_threads, run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.ad_psgd.pairs import Meeting, X, engine_of, is_active, one_exchange_double, wrap


def one_exchange(wrapper: BilatGossipDataParallel, meeting: Meeting) -> None:
    """Each active rank asks once and is answered, no rank has anything in flight; collective."""
    if not is_active(wrapper):
        wrapper(X)
    meeting.wait()
    if is_active(wrapper):
        wrapper(X)
    wrapper.settle()


# No update is lost.


@pytest.mark.parametrize(("n", "num_exchanges"), [(1, 0), (2, 200), (5, 200)])
def test_without_gradients_the_sum_stays_and_the_spread_vanishes(n: int, num_exchanges: int) -> None:
    """So many concurrent exchanges, while training threads apply what they bring."""
    meeting = Meeting(n)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, float, int]:
        wrapper = wrap(mlp(group.rank()), group)
        start = flatten(wrapper.module)
        share = num_exchanges // (n // 2) if is_active(wrapper) else 0
        meeting.run(lambda: wrapper(X), lambda: wrapper.comm_stats()["num_rounds"] >= share)
        wrapper.settle()
        assert not engine_of(wrapper).is_in_flight
        end = flatten(wrapper.module)
        distance = wrapper.consensus_distance()
        wrapper.close()
        return start, end, distance, int(wrapper.comm_stats()["num_rounds"])

    results = run_ranks(n, body)
    start, end = torch.stack([result[0] for result in results]), torch.stack([result[1] for result in results])
    assert (start.sum(0) - end.sum(0)).abs().max() < 1e-6 * n * start.abs().max()
    assert n == 1 or (start - start.mean(0)).abs().max() > 0.1
    assert (end - end.mean(0)).abs().max() < 1e-4
    assert max(result[2] for result in results) < 1e-4
    counts = [result[3] for result in results]
    assert sum(counts[1::2]) == sum(counts[0::2]) >= num_exchanges


@pytest.mark.parametrize(("make", "n"), [(sgd, 4), (adamw, 3)])
def test_the_mean_is_that_of_all_applied_updates(make: Callable[..., torch.optim.Optimizer], n: int) -> None:
    """sum_i x_i = sum_i x_i(0) + sum of what each optimizer has added, to its own rank, at its own pace."""
    meeting = Meeting(n)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        wrapper = wrap(mlp(group.rank()).double(), group)
        optimizer = make(wrapper)
        start = flatten(wrapper.module)
        updates = torch.zeros_like(start)
        steps = 0

        def step() -> None:
            nonlocal steps
            loss_of(wrapper, group.rank(), steps).backward()
            before = flatten(wrapper.module)
            optimizer.step()
            updates.add_(flatten(wrapper.module) - before)
            optimizer.zero_grad()
            steps += 1
            if steps % 7 == group.rank():
                wrapper.eval()
                wrapper.train()

        meeting.run(step, lambda: steps >= 30 * (1 + group.rank()) and engine_of(wrapper).t >= 40 * is_active(wrapper))
        wrapper.settle()
        end = flatten(wrapper.module)
        with wrapper.averaged():
            averaged = flatten(wrapper.module)
        assert torch.equal(flatten(wrapper.module), end)
        wrapper.close()
        return start + updates, end, averaged

    results = run_ranks(n, body)
    expected = sum(result[0] for result in results) / n
    assert updates_matter(results)
    for _, _, averaged in results:
        torch.testing.assert_close(averaged, expected, rtol=0, atol=1e-12)


def updates_matter(results: list[tuple[Tensor, Tensor, Tensor]]) -> bool:
    """Whether ranks have really exchanged: no rank is where its own updates alone would have led it."""
    return all((alone - end).abs().max() > 1e-3 for alone, end, _ in results)


class Constant(nn.Module):
    """All entries of its parameter are equal, always: a torn model would show at once."""

    def __init__(self, start: float, length: int = 50_000) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((length,), start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        assert (self.values == self.values[0]).all(), "torn"
        return self.values.sum() * x


def test_no_model_is_torn() -> None:
    """Neither what a rank trains, nor what it receives from a peer that takes steps meanwhile."""
    n = 3
    meeting = Meeting(n)

    def body(group: dist.ProcessGroup) -> tuple[float, int]:
        wrapper = wrap(Constant(float(group.rank())), group)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
        deliver, num_received = engine_of(wrapper).shared.deliver, 0

        def check(correction: FlatVector, **how: Any) -> None:
            nonlocal num_received
            (values,) = correction.segments
            assert (values == values[0]).all(), "torn"
            num_received += 1
            deliver(correction, **how)

        engine_of(wrapper).shared.deliver = check  # type: ignore[method-assign]

        def step() -> None:
            wrapper(torch.ones(())).backward()
            optimizer.step()
            optimizer.zero_grad()

        meeting.run(step, lambda: num_received >= 50)
        wrapper.close()
        return float(cast(Constant, wrapper.module).values.detach()[0]), num_received

    assert all(count >= 50 for _, count in run_ranks(n, body))


def test_exchanges_during_eval_are_applied_afterwards() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(fill_(nn.Linear(3, 2).double(), group.rank()), group)
        start = flatten(wrapper.module)
        if group.rank() == 0:
            wrapper(X.double())
            wrapper.eval()
            meeting.wait()
            meeting.wait()
            assert torch.equal(flatten(wrapper.module), start)  # nothing changes while it is evaluated
        else:
            meeting.wait()
            for _ in range(5):
                wrapper(X.double())
                wrapper.flush()
            assert not torch.equal(flatten(wrapper.module), start)
            meeting.wait()
        wrapper.train()
        wrapper.settle()
        end = flatten(wrapper.module)
        wrapper.close()
        return torch.stack([start, end])

    starts, ends = torch.stack(run_ranks(2, body)).unbind(1)
    torch.testing.assert_close(starts.sum(0), ends.sum(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-14)


def test_a_peer_that_trains_on_while_this_one_is_averaged_changes_nothing() -> None:
    """The average is lent; who asks in the meantime hears that there is nothing to say."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group)
        start = flatten(wrapper.module)
        with wrapper.averaged():
            average = flatten(wrapper.module)
            if group.rank() == 0:
                meeting.wait()
                assert torch.equal(flatten(wrapper.module), average)
        assert torch.equal(flatten(wrapper.module), start)
        if group.rank() == 1:
            for _ in range(5):
                wrapper(X.double())
                wrapper.flush()
            assert engine_of(wrapper).t == 5
            assert torch.equal(flatten(wrapper.module), start)
            meeting.wait()
        meeting.wait()
        one_exchange_double(wrapper, meeting)
        end = flatten(wrapper.module)
        wrapper.close()
        return torch.stack([start, end, average])

    starts, ends, averages = torch.stack(run_ranks(2, body)).unbind(1)
    torch.testing.assert_close(averages[0], starts.mean(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(ends, averages, rtol=0, atol=1e-14)


def test_average_is_not_undone_by_models_that_peers_had_published_before() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group)
        if group.rank() == 0:
            wrapper(X.double())  # publishes what is not the average
        wrapper.average_()
        average = flatten(wrapper.module)
        meeting.wait()
        if group.rank() == 1:
            for _ in range(5):
                wrapper(X.double())
                wrapper.flush()
        wrapper.settle()
        assert torch.equal(flatten(wrapper.module), average)
        wrapper.close()
        return average

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_settle_leaves_nothing_in_flight_anywhere() -> None:
    """Each active rank has just asked when all ranks settle, again and again."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        wrapper = wrap(mlp(group.rank()).double(), group)
        states = [flatten(wrapper.module)]
        for i in range(40):
            for _ in range((group.rank() + i) % 3 + 1):
                wrapper(X.double())
            wrapper.settle()  # those who come out of it first ask the others at once
            assert not engine_of(wrapper).is_in_flight
            states.append(flatten(wrapper.module))
        wrapper.close()
        return states

    states = torch.stack([torch.stack(one) for one in run_ranks(4, body)])
    assert (states.sum(0) - states[:, 0].sum(0)).abs().max() < 1e-13


@pytest.mark.parametrize("graph", [DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph])
def test_other_graphs_and_weights(graph: type[DynamicBipartiteExponentialGraph]) -> None:
    meeting = Meeting(4)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group, mixing=MetropolisHastingsMixing(graph(4)))
        start = flatten(wrapper.module)
        for _ in range(6):
            one_exchange_double(wrapper, meeting)
        end = flatten(wrapper.module)
        wrapper.close()
        return torch.stack([start, end])

    starts, ends = torch.stack(run_ranks(4, body)).unbind(1)
    torch.testing.assert_close(ends.sum(0), starts.sum(0), rtol=0, atol=1e-13)
    assert (ends - ends.mean(0)).norm() < 0.3 * (starts - starts.mean(0)).norm()


# Like other wrappers.


def test_a_world_of_one_is_plain_training() -> None:
    bare, module = net(), net()
    wrapper = wrap(module, solo_group())
    first, second = sgd(bare), sgd(module)
    for step in range(5):
        train_step(bare, first, 0, step)
        train_step(wrapper, second, 0, step)
    wrapper.settle()
    assert_no_gossip_threads()
    wrapper.close()
    assert torch.equal(flatten(bare), flatten(module))
    assert wrapper.comm_stats()["bytes_sent"] == 0


def test_all_dtypes_meet() -> None:
    meeting = Meeting(2)
    dtypes = (torch.float32, torch.float64, torch.bfloat16)

    class Towers(nn.Module):
        """One layer per dtype."""

        def __init__(self, start: float) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 2, dtype=dtype) for dtype in dtypes])
            for parameter in self.parameters():
                parameter.detach().fill_(start)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([layer(x.to(next(layer.parameters()).dtype)).double() for layer in self.layers])

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(Towers(8.0 * group.rank()), group)
        one_exchange(wrapper, meeting)
        for parameter, dtype in zip(wrapper.module.parameters(), dtypes, strict=False):
            assert (parameter == 4.0).all(), dtype
        assert {parameter.dtype for parameter in wrapper.parameters()} == set(dtypes)
        wrapper.close()

    run_ranks(2, body)


@pytest.mark.parametrize("gossip_buffers", [True, False])
def test_buffers_are_averaged_or_stay_local(gossip_buffers: bool) -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> tuple[float, int]:
        model = net(group.rank())
        norm = model.get_submodule("norm")
        norm.momentum = 0.0  # type: ignore[assignment]
        model.get_buffer("norm.running_mean").fill_(float(group.rank()))
        wrapper = wrap(model, group, gossip_buffers=gossip_buffers)
        one_exchange(wrapper, meeting)
        wrapper.close()
        return float(model.get_buffer("norm.running_mean")[0]), int(model.get_buffer("norm.num_batches_tracked"))

    assert run_ranks(2, body) == ([(0.5, 1)] * 2 if gossip_buffers else [(0.0, 1), (1.0, 1)])


@pytest.mark.parametrize("num_exchanges", [1, 3])
def test_variances_that_decay_while_an_exchange_is_under_way_stay_variances(num_exchanges: int) -> None:
    """A BatchNorm at 100 says so, gets 1 from its peer, and is at .01 when that is there."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> list[float]:
        norm = nn.BatchNorm1d(3).double()
        norm.momentum = 1.0
        wrapper = wrap(norm, group)
        data = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, 3) * 10.0 ** group.rank() / 2**0.5
        for _ in range(3):
            wrapper(data)  # and publishes, at the second one
            wrapper.settle()
        deliver, num_delivered = engine_of(wrapper).shared.deliver, 0
        wrapper(data)
        # The exchange of this step ends on both sides before the next ones are counted.
        if is_active(wrapper):
            wrapper.flush()
        meeting.wait()
        wrapper.flush()

        def decay_then_deliver(correction: FlatVector, **how: Any) -> None:
            nonlocal num_delivered
            norm.running_var.fill_(0.01)  # type: ignore[union-attr]
            deliver(correction, **how)
            num_delivered += 1

        engine_of(wrapper).shared.deliver = decay_then_deliver  # type: ignore[method-assign]
        meeting.wait()
        for _ in range(num_exchanges * is_active(wrapper)):
            wrapper(data)
            wrapper.flush()
        meeting.wait()
        wrapper.settle()
        assert num_delivered >= num_exchanges
        variances = norm.running_var.tolist()  # type: ignore[union-attr]
        wrapper.eval()
        assert wrapper(data).isfinite().all()
        wrapper.close()
        return variances

    for variances in run_ranks(2, body):
        assert min(variances) > 0.0099


def test_frozen_parameters_stay() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(group.rank())
        model.get_submodule("0").requires_grad_(False)
        frozen = model.get_parameter("0.weight").clone()
        wrapper = wrap(model, group)
        one_exchange(wrapper, meeting)
        wrapper.close()
        assert torch.equal(model.get_parameter("0.weight"), frozen)
        return model.get_parameter("2.weight").detach(), frozen

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_forwards_of_one_step_ask_once() -> None:
    """The rest of its forwards are in `no_sync()`; a step asks once at most, and not while an answer is out."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        if is_active(wrapper):
            meeting.wait()
            for step in range(4):
                with wrapper.no_sync():
                    for _ in range(3):
                        wrapper(X)
                        assert engine_of(wrapper).t == step + 1
                wrapper(X)
                wrapper.flush()
        else:
            wrapper(X)
            meeting.wait()
        wrapper.settle()
        assert wrapper.comm_stats()["num_rounds"] == 4
        wrapper.close()

    run_ranks(2, body)


def test_backward_through_a_graph_from_before_a_correction_raises() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        early = loss_of(wrapper, 0, 0)
        while wrapper.comm_stats()["num_rounds"] == 0:
            wrapper.settle()
            wrapper(X)
        wrapper.settle()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        wrapper.close()

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:got a training forward")
def test_a_copy_is_local() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        one_exchange(wrapper, meeting)
        num_threads = len(gossip_threads())
        twin = copy.deepcopy(wrapper)
        meeting.wait()
        assert len(gossip_threads()) == num_threads
        values = flatten(twin.module)
        assert torch.equal(values, flatten(wrapper.module))
        assert twin.get_extra_state() == wrapper.get_extra_state()
        for _ in range(3):
            wrapper(X)
            twin(X)
        wrapper.settle()
        assert torch.equal(flatten(twin.module), values)
        twin.load_state_dict(wrapper.state_dict())
        assert torch.equal(flatten(twin.module), flatten(wrapper.module))
        twin.close()
        wrapper.close()

    run_ranks(2, body)


def test_another_dtype_after_wrapping_is_refused() -> None:
    wrapper = wrap(mlp(), solo_group())
    wrapper(X)
    wrapper.double()
    with pytest.raises(ValueError, match=r"dtypes, trained tensors or device .*changed .*before wrapping"):
        wrapper(X.double())
    wrapper.close()
