"""Ranks that differ are named, with what differs, on every rank; and the model of rank 0 reaches all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import connect
from gossip_modules.extend import ProcessGroupTransport
from gossip_modules.transport.agreement import broadcast_tensors, check_agreement
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group

Description = Mapping[str, str | Sequence[str]]


def transport_of(group: dist.ProcessGroup, timeout: timedelta = TIMEOUT) -> ProcessGroupTransport:
    """A transport on a group of the tests."""
    return connect(group, module_device=CPU, timeout=timeout)


def test_equal_descriptions_pass() -> None:
    run_ranks(3, lambda group: check_agreement(transport_of(group), {"graph": "ring", "model": ["weight", "bias"]}))


def test_the_order_of_options_is_no_difference() -> None:
    options = {"graph": "ring", "overlap": "False", "model": ["weight", "bias"]}

    def body(group: dist.ProcessGroup) -> None:
        check_agreement(transport_of(group), dict(sorted(options.items(), reverse=group.rank() == 1)))

    run_ranks(3, body)


def test_a_world_of_one_agrees_with_itself() -> None:
    transport = transport_of(solo_group())
    check_agreement(transport, {"graph": "ring"})
    assert transport.num_bytes_sent == 0


# What rank 2 says where the others say {"graph": "ring", "model": ["weight (2,)", "bias (1,)"]}.
CASES: list[tuple[Description, str]] = [
    ({"graph": "star", "model": ["weight (2,)", "bias (1,)"]}, "graph: got star, expected ring"),
    ({"graph": "ring", "model": ["weight (2,)", "bias (2,)"]}, "model: got bias (2,), expected bias (1,)"),
    ({"graph": "ring", "model": ["weight (2,)"]}, "model: got 1 entries, expected 2"),
    ({"graph": "ring", "model": []}, "model: got 0 entries, expected 2"),
    ({"graph": "ring"}, "model: got None, expected ['weight (2,)', 'bias (1,)']"),
    ({"graph": "x" * 2000, "model": []}, "graph: got xxxxxxxx"),
    ({"graph": "é" * 600, "model": []}, "graph: got éééé"),  # cut in the middle of a letter
    ({"graph": "star", "model": []}, "graph: got star, expected ring"),  # the first difference only
]


@pytest.mark.parametrize(("other", "message"), CASES, ids=[message[:30] for _, message in CASES])
def test_the_rank_and_its_first_difference_are_named_everywhere(other: Description, message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        description = other if group.rank() == 2 else {"graph": "ring", "model": ["weight (2,)", "bias (1,)"]}
        with pytest.raises(ValueError, match="ranks do not agree with rank 0: ") as caught:
            check_agreement(transport_of(group), description)
        assert f"rank 2: {message}" in str(caught.value)
        assert "rank 1: " not in str(caught.value)
        assert str(caught.value).endswith("; wrap the same model with the same options on every rank")

    run_ranks(4, body)


def test_all_that_differ_are_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="rank 1: seed: got 1, expected 0; rank 2: seed: got 2, expected 0"):
            check_agreement(transport_of(group), {"seed": str(group.rank())})

    run_ranks(3, body)


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() != 1:
            pattern = r"^rank [02]: comparing model and options among ranks \[0, 1, 2\] failed after \d\.\d s"
            pattern += r".*: rank 1 did not take part in comparing model and options;"
            with pytest.raises((TimeoutError, ConnectionError), match=pattern):
                check_agreement(transport_of(group, timedelta(seconds=0.4)), {})

    run_ranks(3, body)


TENSORS: dict[str, Callable[[int], Tensor]] = {
    "float32": lambda r: torch.full((3, 2), r + 0.5),
    "float64": lambda r: torch.full((5,), r + 0.5, dtype=torch.float64),
    "bfloat16": lambda r: torch.full((3,), r + 0.5, dtype=torch.bfloat16),
    "complex": lambda r: torch.full((2,), 1j * r),
    "int64": lambda r: torch.tensor(r + 7),
    "bool": lambda r: torch.tensor([r == 0, True]),
    "empty": lambda r: torch.empty(0),
    "strided": lambda r: torch.arange(6.0).view(2, 3).t() + r,
    "parameter": lambda r: torch.nn.Parameter(torch.full((4,), float(r))),
}


@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 26])
def test_broadcast_brings_every_tensor_of_rank_0(chunk_bytes: int) -> None:
    def body(group: dist.ProcessGroup) -> list[Tensor]:
        tensors = [make(group.rank()) for make in TENSORS.values()]
        pointers = [tensor.data_ptr() for tensor in tensors]
        broadcast_tensors(transport_of(group), tensors, chunk_bytes=chunk_bytes)
        assert [tensor.data_ptr() for tensor in tensors] == pointers
        return tensors

    for tensors in run_ranks(3, body):
        for make, tensor in zip(TENSORS.values(), tensors, strict=True):
            assert torch.equal(tensor, make(0))
            assert tensor.dtype is make(0).dtype


def test_broadcast_of_nothing() -> None:
    broadcast_tensors(transport_of(solo_group()), [])
