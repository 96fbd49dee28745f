"""DeepSqueeze against the lines of the paper, and what its error feedback keeps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gossip_modules import DeepSqueeze, SignNorm, TopK
from gossip_modules.compression import Compressor
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from tests.harness.ranks import run_ranks
from tests.library.algorithms.contract import DYNAMIC, STATIC, bound, vector_of
from tests.library.algorithms.test_choco import CODE_NAMES, CODES, Code
from tests.library.algorithms.test_compressed import rounds_of

LAYOUT = FlatLayout.of([(torch.float64, [TensorSpec((3, 4)), TensorSpec((5,))])])
MIXINGS = {"ring": STATIC["ring"], "star": STATIC["star"], "path": STATIC["path"], "bipartite": DYNAMIC["bipartite"]}


@pytest.mark.parametrize("graph", MIXINGS)
@pytest.mark.parametrize(("compressor", "code"), CODES, ids=CODE_NAMES)
def test_rounds_are_those_of_the_paper(compressor: Compressor, code: Code, graph: str) -> None:
    """v = x + e;  e <- v - C(v);  x_i <- x_i + step_size sum_j W_ij (C(v_j) - C(v_i))."""
    x, *rest = rounds_of(lambda: DeepSqueeze(compressor, step_size=0.2), MIXINGS[graph], 10, LAYOUT)
    error = torch.zeros_like(x)
    for t, got in enumerate(rest):
        W = MIXINGS[graph].matrix(t)
        v = x + error
        sent = torch.stack([code(row) for row in v])
        error = v - sent
        # Written out over the edges, as the paper has it, not as a matrix product.
        x = x + 0.2 * torch.stack([sum((W[i, j] * (sent[j] - sent[i]) for j in range(4)), x[0] * 0) for i in range(4)])
        torch.testing.assert_close(got, x, rtol=0, atol=1e-6 if code is not CODES[0][1] else 1e-13)


@pytest.mark.parametrize("graph", MIXINGS)
def test_an_exact_code_is_plain_gossip(graph: str) -> None:
    first, *rest = rounds_of(lambda: DeepSqueeze(TopK(1.0), step_size=0.8), MIXINGS[graph], 6, LAYOUT)
    for t, x in enumerate(rest):
        first = first + 0.8 * (MIXINGS[graph].matrix(t) @ first - first)
        torch.testing.assert_close(x, first, rtol=0, atol=1e-13)


@pytest.mark.parametrize("compressor", [TopK(0.1), SignNorm(8)], ids=str)
def test_the_unsent_rest_is_kept(compressor: Compressor) -> None:
    """error(T) + sum of all messages = sum of all x that were to be sent."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = (
            bound(DeepSqueeze(compressor, step_size=0.1), STATIC["ring"], group),
            vector_of(group.rank(), LAYOUT),
        )
        wanted, sent = torch.zeros_like(s.segments[0]), torch.zeros_like(s.segments[0])
        message, error = compressor.message_like(wanted), torch.zeros_like(wanted)
        for t in range(10):
            wanted += s.segments[0]
            # The message of this round, coded once more from the state.
            compressor.compress(error + s.segments[0], message, t=t)
            compressor.add_decompressed(message, sent)
            gossiper.mix(s, t)
            error = gossiper.state_dict()["memory"]["vectors"]["error"][0].clone()
            torch.testing.assert_close(error + sent, wanted, rtol=0, atol=1e-12)
        assert bool(error.any())

    run_ranks(4, body)


def test_bytes_are_the_compressors_and_a_header() -> None:
    layout = FlatLayout.of([(torch.float32, [TensorSpec((40, 10)), TensorSpec((30,))])])
    size = SignNorm(64).num_bytes(430, torch.float32)

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(DeepSqueeze(SignNorm(64), step_size=0.1), STATIC["ring"], group)
        gossiper.mix(vector_of(group.rank(), layout), 0)
        assert gossiper.transport.num_bytes_sent == 2 * (8 + -(-size // 8) * 8)

    run_ranks(4, body)
