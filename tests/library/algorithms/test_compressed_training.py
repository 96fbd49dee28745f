"""Algorithms whose ranks send messages, around a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import DPSGD, Choco, DeepSqueeze, Moniqua, PowerGossip, SignNorm, TopK
from gossip_modules.compression import Identity
from gossip_modules.flat.buffer import FlatBuffer
from gossip_modules.rounds.algorithm import Algorithm
from tests.harness.problems import loss_of, mlp, net, numerator, sgd
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten
from tests.library.algorithms.contract import ALGORITHMS, EACH_MEMORY, STATIC, bound, ring, train, wrap


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_algorithm_alone_is_enough(n: int) -> None:
    """The wrapper takes an undirected ring in every world."""

    def body(group: dist.ProcessGroup) -> None:
        for make in ALGORITHMS.values():
            wrapper = wrap(net(group.rank()), group, algorithm=make())
            train(wrapper, group.rank(), range(2))
            assert wrapper.comm_stats()["num_rounds"] == 2
            assert (wrapper.comm_stats()["bytes_sent"] > 0) is (n > 1)
            wrapper.close()

    run_ranks(n, body)


@EACH_MEMORY
def test_gradient_steps_in_flight_are_kept(name: str) -> None:
    """sum_i x_i = sum_i x_i(0) + all that the optimizers did."""

    def body(group: dist.ProcessGroup) -> Tensor:
        model = mlp(group.rank()).double()
        x = flatten(model)
        wrapper = wrap(model, group, mixing=STATIC["star"], algorithm=ALGORITHMS[name](), overlap=True)
        optimizer = sgd(model)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(wrapper, group.rank(), step).backward()
            before = numerator(wrapper)
            optimizer.step()
            x += numerator(wrapper) - before
        wrapper.close()
        return flatten(model) - x

    lost = torch.stack(run_ranks(4, body))
    assert float(lost.sum(0).abs().max()) < 1e-12
    assert float(lost.abs().max()) > 1e-3, "nothing was mixed"


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "freeze": lambda module: module.get_submodule("first").requires_grad_(False),
    "double": lambda module: module.double(),
}


@EACH_MEMORY
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_is_gossiped_everywhere(name: str, change: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(group.rank()), group, mixing=ring(2), algorithm=ALGORITHMS[name]())
        train(wrapper, group.rank(), range(2))
        CHANGES[change](wrapper.module)
        wrapper.flush()
        train(wrapper, group.rank(), range(2, 4))
        assert wrapper.comm_stats()["num_rounds"] == 4
        assert bool(flatten(wrapper.module).isfinite().all())

    if "PowerGossip" not in name:  # which has something of each matrix; vectors stay as far as tensors do
        run_ranks(2, body)
        return
    with pytest.warns(UserWarning, match=r"\w+\(.*\): other tensors are trained than before"):
        run_ranks(2, body)


def test_ranks_that_disagree_about_an_option_are_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        for one, other in (
            (Choco(SignNorm(), step_size=0.1), Choco(SignNorm(8), step_size=0.1)),
            (PowerGossip(), PowerGossip(seed=1)),
            (Moniqua(1.0), DeepSqueeze(SignNorm(), step_size=0.1)),
        ):
            algorithm = (one, other)[group.rank()]
            message = re.escape(f"rank 1: algorithm: got {other} by PushPull(), expected {one} by PushPull()")
            with pytest.raises(ValueError, match=message):
                wrap(net(), group, mixing=ring(2), algorithm=algorithm)

    run_ranks(2, body)


class Mostly(nn.Module):
    """A model of so many parameters of one dimension, and so many in a matrix."""

    def __init__(self, num_vector: int, num_matrix: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(num_vector, dtype=dtype))
        self.matrix = nn.Parameter(torch.zeros(16, num_matrix // 16, dtype=dtype))
        self.register_buffer("statistics", torch.zeros(5000))


def warnings_of(module: Callable[[], nn.Module], make: Callable[[], Algorithm]) -> list[str]:
    """What three rounds of two ranks warn of."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(make(), ring(2), group)
        vector = FlatBuffer(module()).vector
        for t in range(3):
            gossiper.mix(vector, t)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_ranks(2, body)
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_mostly_vectors_is_told_so_once(dtype: torch.dtype) -> None:
    """Buffers do not count: no code may touch them."""
    (warning,) = warnings_of(lambda: Mostly(3840, 160 * 16, dtype), PowerGossip)
    num_bytes = f"{3840 * dtype.itemsize:,}"
    assert re.search(
        rf"60% of the parameters' bytes \({num_bytes}\) are .* one dimension, which are sent uncompressed in every "
        r"round; .*compress_vectors=True",
        warning,
    )
    assert warnings_of(lambda: Mostly(1920, 160 * 16, dtype), PowerGossip) == []
    assert warnings_of(lambda: Mostly(3840, 160 * 16, dtype), lambda: PowerGossip(compress_vectors=True)) == []
    assert warnings_of(lambda: Mostly(3840, 160 * 16, dtype), lambda: Moniqua(1.0)) == []


@pytest.mark.parametrize(
    "make",
    [lambda: Choco(TopK(1.0), step_size=0.1), lambda: DeepSqueeze(TopK(1.0), step_size=0.1)],
)
def test_a_code_that_saves_nothing_is_named_once(make: Callable[[], Algorithm]) -> None:
    """All values and their indices are more than the values. Of what is tiny nothing is said."""
    (warning,) = warnings_of(lambda: nn.Linear(40, 40), make)
    assert re.search(
        r"the compressed message of 6,560 bytes of parameters has [\d,]+ bytes, so compression saves nothing", warning
    )
    assert warnings_of(lambda: nn.Linear(8, 8), make) == []


def test_an_exact_code_is_the_algorithm_without_compression() -> None:
    """CHOCO with a step size of one is D-PSGD then; it promises no fewer bytes, so it warns of none."""

    def trained(algorithm: Algorithm) -> Tensor:
        def body(group: dist.ProcessGroup) -> Tensor:
            model = mlp(group.rank()).double()
            wrapper = wrap(model, group, mixing=ring(4), algorithm=algorithm)
            train(wrapper, group.rank(), range(5))
            wrapper.close()
            return flatten(model)

        return torch.stack(run_ranks(4, body))

    exact, plain = trained(Choco(Identity(), step_size=1.0)), trained(DPSGD())
    torch.testing.assert_close(exact, plain, rtol=0, atol=1e-12)
    assert warnings_of(lambda: nn.Linear(40, 40), lambda: Choco(Identity(), step_size=1.0)) == []
