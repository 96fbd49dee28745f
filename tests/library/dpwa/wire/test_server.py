"""The server of models: what is served, refused, and how it begins and ends."""

from __future__ import annotations

import pytest
import torch

from gossip_modules.dpwa.interpolation import Standing
from gossip_modules.dpwa.wire.client import Fetched
from gossip_modules.dpwa.wire.message import HEADER_BYTES
from gossip_modules.flat.vector import FlatVector
from tests.harness.strangers import (
    TIMEOUT,
)
from tests.library.dpwa.wire.serving import asking, fetch, serving, vector_of


def test_the_newest_model_is_served_with_its_progress() -> None:
    inbox = vector_of(0.0)
    with serving(inbox) as server, asking(server, inbox) as client:
        for value in (1.0, 2.0, 3.0):
            x = vector_of(value)
            server.publish(x, Standing(10 * value, 1 / value))
            x.raw.zero_()  # what is served is a copy
            assert client.fetch(inbox, TIMEOUT) == Fetched("s", Standing(10 * value, 1 / value))
            assert torch.equal(inbox.segments[0], torch.full((1000,), value))
        assert server.stats.num_models_sent == 3
        assert server.stats.bytes_sent == 3 * (HEADER_BYTES + inbox.layout.num_bytes)
        assert client.stats.bytes_received == server.stats.bytes_sent
        assert client.stats.bytes_sent == 3 * HEADER_BYTES


def test_nothing_published_is_no_reason_to_ask_again() -> None:
    inbox = vector_of(0.0)
    with serving(inbox) as server, asking(server, inbox) as client:
        assert client.fetch(inbox, TIMEOUT) is None
        assert client.stats.num_fetches == 1
        assert client.stats.num_failed_fetches == 0
        assert client.scores.scores == {"s": 1000}


def test_another_model_is_refused_before_it_travels() -> None:
    x, inbox = vector_of(1.0), vector_of(0.0, numel=7)
    with serving(x) as server, asking(server, inbox) as client:
        server.publish(x, Standing())
        assert client.fetch(inbox, TIMEOUT) is None
        assert client.stats.num_refused_models == 1
        assert "got a model of 1 tensors of float32, 4000 bytes, expected" in client.stats.refusals["s"]
        assert client.stats.bytes_received == HEADER_BYTES
        assert server.stats.num_models_sent == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_is_refused(bad: float) -> None:
    x = vector_of(1.0)
    x.segments[0][123] = bad
    inbox = vector_of(0.0)
    with serving(x) as server, asking(server, inbox) as client:
        server.publish(x, Standing())
        assert client.fetch(inbox, TIMEOUT) is None
        assert client.stats.num_refused_models == 1
        assert "got a model with infinite or NaN values" in client.stats.refusals["s"]
        assert client.scores.scores == {"s": 900}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_large_numbers_are_finite(dtype: torch.dtype) -> None:
    x = FlatVector.over(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))  # whose sum overflows
    with serving(x) as server:
        server.publish(x, Standing())
        inbox = FlatVector.over(torch.zeros(1000, dtype=dtype))
        assert fetch(server, inbox) is not None
        assert torch.equal(inbox.raw, x.raw)


def test_a_loss_that_is_not_finite_is_refused_before_the_model_is_read() -> None:
    x = vector_of(1.0)
    inbox = vector_of(0.0)
    with serving(x) as server, asking(server, inbox) as client:
        server.publish(x, Standing(1.0, float("nan")))
        assert client.fetch(inbox, TIMEOUT) is None
        assert "got loss nan" in client.stats.refusals["s"]
        assert not inbox.raw.any()
