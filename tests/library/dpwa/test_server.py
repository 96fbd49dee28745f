"""The server of models: what is served, refused, and how it begins and ends."""

from __future__ import annotations

import pytest
import torch

from gossip_modules.dpwa.fetcher import Fetched
from gossip_modules.dpwa.interpolation import Standing
from gossip_modules.dpwa.protocol import HEADER_BYTES
from gossip_modules.flat.vector import FlatVector
from tests.harness.strangers import LENGTH_BYTES
from tests.library.dpwa.serving import Asking, fetch, serving, vector_of
from tests.library.dpwa.workers import wait_for


def test_the_newest_model_is_served_with_its_progress() -> None:
    inbox = vector_of(0.0)
    with serving(inbox) as server:
        client = Asking(server.address, inbox)
        for value in (1.0, 2.0, 3.0):
            x = vector_of(value)
            server.publish(x, Standing(10 * value, 1 / value))
            x.raw.zero_()  # what is served is a copy
            assert client.fetch(inbox) == Fetched("s", Standing(10 * value, 1 / value))
            assert torch.equal(inbox.segments[0], torch.full((1000,), value))
        num_bytes = 3 * (2 * LENGTH_BYTES + HEADER_BYTES + inbox.layout.num_bytes)
        wait_for(lambda: server.count("bytes_sent") == num_bytes)
        assert server.count("num_models_sent") == 3
        assert client.count("bytes_received") == num_bytes
        assert client.count("bytes_sent") == 3 * (LENGTH_BYTES + HEADER_BYTES)


def test_nothing_published_is_no_reason_to_ask_again() -> None:
    inbox = vector_of(0.0)
    with serving(inbox) as server:
        client = Asking(server.address, inbox)
        assert client.fetch(inbox) is None
        assert client.count("num_fetches") == 1
        assert client.count("num_failed_fetches") == 0
        assert client.scores.scores == {"s": 1000}


def test_another_model_is_refused_before_it_travels() -> None:
    x, inbox = vector_of(1.0), vector_of(0.0, numel=7)
    with serving(x) as server:
        client = Asking(server.address, inbox)
        server.publish(x, Standing())
        assert client.fetch(inbox) is None
        assert client.count("num_refused_models") == 1
        assert "got a model of 1 tensors, 4000 bytes, expected" in client.counts.refusals["s"]
        assert client.count("bytes_received") == LENGTH_BYTES + HEADER_BYTES
        assert server.count("num_models_sent") == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_is_refused(bad: float) -> None:
    x = vector_of(1.0)
    x.segments[0][123] = bad
    inbox = vector_of(0.0)
    with serving(x) as server:
        client = Asking(server.address, inbox)
        server.publish(x, Standing())
        assert client.fetch(inbox) is None
        assert client.count("num_refused_models") == 1
        assert "got a model with infinite or NaN values" in client.counts.refusals["s"]
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
    with serving(x) as server:
        client = Asking(server.address, inbox)
        server.publish(x, Standing(1.0, float("nan")))
        assert client.fetch(inbox) is None
        assert "got loss nan" in client.counts.refusals["s"]
        assert not inbox.raw.any()
