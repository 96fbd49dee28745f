"""The pages of docs/methods: one per method, alike in shape, and what they say of files, papers and bytes is so."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import (
    D2,
    EXTRA,
    KGT,
    QSGD,
    Choco,
    DecentLaM,
    DeepSqueeze,
    DiLoCo,
    EagerDiLoCo,
    ExactDiffusion,
    GASLoC,
    GossipDataParallel,
    GradientTracking,
    GroupAverageDataParallel,
    IsoLoCo,
    MatchaGraph,
    Moniqua,
    MuLoCo,
    NoLoCo,
    PowerGossip,
    ProxSkip,
    PULSELoCo,
    QGDSGDm,
    RingGraph,
    Schedule,
    SignNorm,
    SlowMo,
    SparseLoCo,
    Sparta,
    StreamingDiLoCo,
    TopK,
)
from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from gossip_modules.lab import Compute, Consensus, Network, Setting, simulate
from gossip_modules.methods import METHODS
from gossip_modules.methods.chosen import read_algorithm
from gossip_modules.wrappers.base import GossipWrapper
from tests.harness.ranks import run_ranks
from tests.library.rounds.memories import memory_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "methods"
OVERVIEWS = ("index", "combinations")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md") if path.stem not in OVERVIEWS}
HEADINGS = ["Update", "When to use it", "Example", "Options", "Cost", "Guarantees", "Measured", "Source"]
TRAINED = ("accuracy_bytes", "outer_language", "translation", "worker_numbers")  # tables of trainings

NUM_RANKS, NUM_ROUNDS = 4, 12  # rounds: a multiple of all periods below
ROWS, COLUMNS = 64, 96
P = 4 * ROWS * COLUMNS  # bytes of the model
HEADER = 8  # of a compressed message


def test_every_method_has_a_page_and_the_index_lists_it() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[[^]]+\]\((\w+)\.md\)", index, re.MULTILINE)) == sorted(PAGES)


def test_the_table_of_memory_has_the_cell_of_each_page() -> None:
    _, _, section = (FOLDER / "index.md").read_text(encoding="utf-8").partition("## Memory")
    shown = re.findall(r"^\| \[[^]]+\]\((\w+)\.md#cost\) \| (.*) \|$", section, re.MULTILINE)
    found = (re.search(r"^\| memory beside the model \| (.*) \|$", PAGES[name], re.MULTILINE) for name, _ in shown)
    assert shown == [(name, cell[1]) for (name, _), cell in zip(shown, found, strict=True) if cell]
    assert sorted(name for name, _ in shown) == sorted(PAGES)


BILLION = re.findall(
    r"^\| `(.*)` \| (\S+) \| (\S+) \|$",
    (FOLDER / "index.md").read_text(encoding="utf-8").partition("{ #billion }")[2].partition("\n## ")[0],
    re.MULTILINE,
)


@pytest.mark.parametrize(("text", "memory", "sent"), BILLION, ids=[text.partition("(")[0] for text, _, _ in BILLION])
def test_the_gigabytes_of_a_billion_parameters_are_computed(text: str, memory: str, sent: str) -> None:
    """Of memory by the cell of the method's page, in models of 4 GB, less or more by the settings that it names; of
    messages by the Lab, of 8 workers."""
    name = read_algorithm(text).method.name
    cell = re.findall(r"^\| memory beside the model \| (\w+)", PAGES[name], re.MULTILINE)[0]
    by_settings = (2 if "all_reduce" in text else 0) - (1 if "momentum=0.0" in text else 0)
    assert float(memory) == 4 * (["none", "one", "two", "three"].index(cell) + by_settings)
    setting = Setting(8, 10**9, Compute(1.0), Network("10 Gbit/s"))
    found = simulate(text, setting, Consensus(), target=1e-300, max_steps=60)
    period = int((re.findall(r"sync_every=(\d+)", text) or ["1"])[0])
    num_rounds = found.num_steps // period
    assert float(sent) == float(f"{found.rank_bytes / num_rounds / period / 1e9:.2g}")


@pytest.mark.parametrize("text", [text for text, _, _ in BILLION if "sync_every" in text])
def test_the_vectors_of_outer_methods_are_those_of_the_table(text: str) -> None:
    """After two outer steps: vectors of the memory, scratches and the state of the outer optimizer."""
    algorithm = replace(read_algorithm(text).made, sync_every=1)

    def body(group: dist.ProcessGroup) -> int:
        wrapper = GossipDataParallel(nn.Linear(64, 64, bias=False), process_group=group, algorithm=algorithm)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        for _ in range(3):
            wrapper(torch.ones(1, 64)).square().sum().backward()
            optimizer.step()
        memory = memory_of(wrapper)
        kept = [*(entry.vector for entry in memory.entries.values()), *memory.scratches.values()]
        states = [state.values() for one in memory.optimizers.values() for state in one.optimizer.state.values()]
        tensors = [*(part for vector in kept for part in vector.parts), *(x for state in states for x in state)]
        wrapper.close()
        return sum(x.numel() for x in tensors if isinstance(x, torch.Tensor)) // 64**2

    (memory,) = [float(memory) for shown, memory, _ in BILLION if shown == text]
    assert run_ranks(2, body) == [memory / 4] * 2


def test_the_table_of_a_billion_parameters_has_several_methods() -> None:
    assert len(BILLION) == 9


def test_every_registered_method_has_a_page() -> None:
    assert sorted(PAGES) == sorted(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_page_agrees_with_the_registry(name: str) -> None:
    method, page = METHODS[name], " ".join(PAGES[name].split())
    assert page.startswith(f"# {method.title} ")
    assert f"`{method.file}`" in page
    assert f"`{method.example}`" in page
    if method.paper:
        assert f'{method.paper.authors}, "{method.paper.title}", {method.paper.venue}' in page
        assert not method.paper.arxiv or f"arXiv {method.paper.arxiv}" in page
    for option in method.options - {"graph", "gossip_every", "average_every", "nprocs_per_node"}:
        assert re.search(rf"`--(no-)?{option.replace('_', '-')}\b", page), option


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_headings_of_all(name: str) -> None:
    page = PAGES[name]
    assert len(re.sub(r"^\|.*\n", "", page, flags=re.MULTILINE).splitlines()) < 100  # without tables
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == HEADINGS
    assert "--recipe " + name in page
    assert "W(t)" in page


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name: str) -> None:
    files = re.findall(r"`((?:gossip_modules|train|benchmarks|examples)/[\w./]+\.\w+)`", PAGES[name])
    assert files
    for file in files:
        assert (ROOT / file).is_file(), f"{name}.md names {file}"


def test_words_are_linked_to_entries_of_the_glossary() -> None:
    entries = re.findall(r"^## (.*)$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {entry.lower().replace(" ", "-") for entry in entries}
    linked = {anchor for page in PAGES.values() for anchor in re.findall(r"glossary\.md#([\w-]+)", page)}
    assert linked
    assert linked <= anchors


def results(name: str) -> list[dict[str, str]]:
    """The rows of a table of benchmarks."""
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured_of(name: str) -> str:
    """What a page says was measured, on one line."""
    return " ".join(PAGES[name].partition("## Measured")[2].partition("## Source")[0].split())


CODES = {
    "choco": ["CHOCO, sign", "CHOCO, top 1 %"],
    "deepsqueeze": ["DeepSqueeze, sign"],
    "moniqua": ["Moniqua, 8 bits", "Moniqua, 2 bits"],
    "powergossip": ["PowerGossip, rank 1, 1 iteration"],
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_that_training_was_not_measured_only_where_it_was_not(name: str) -> None:
    trained = {row["method"].partition(",")[0].lower() for table in TRAINED for row in results(table)}
    is_trained = METHODS[name].title.lower() in trained
    assert "has not been measured in" not in measured_of(name) or not is_trained


Make = Callable[[nn.Module, dist.ProcessGroup], GossipWrapper]


def gossip(make_options: Callable[[], dict[str, object]]) -> Make:
    """A wrapper with options made anew on each rank."""
    return lambda module, group: GossipDataParallel(module, process_group=group, **make_options())  # type: ignore[arg-type]


RING = RingGraph(NUM_RANKS, peers_per_itr=2)
SENDING = sum(not ProxSkip(0.5).is_silent(k) for k in range(NUM_ROUNDS))
FOUR_BITS = QSGD(4, bucket_size=32, unbiased=True)
COSTS: dict[str, tuple[Make, float]] = {
    # bytes that a rank sends per step, by the page
    "localsgd": (gossip(lambda: {"schedule": Schedule(gossip_every=3, average_every=1)}), 2 * 3 / 4 * P / 3),
    # The first of 12 forwards comes before any step, so there are three outer steps.
    "diloco": (gossip(lambda: {"algorithm": DiLoCo(3)}), 2 * 3 / 4 * P * 3 / NUM_ROUNDS),
    # Fragment 1 of 2 begins half a period early; fragments are cut at 64 elements.
    "streamingdiloco": (
        gossip(lambda: {"algorithm": StreamingDiLoCo(4, fragments=2)}),
        2 * 3 / 4 * P * 2.5 / NUM_ROUNDS,
    ),
    "eagerdiloco": (gossip(lambda: {"algorithm": EagerDiLoCo(3)}), 2 * 3 / 4 * P * 3 / NUM_ROUNDS),
    "muloco": (gossip(lambda: {"algorithm": MuLoCo(3)}), 2 * 3 / 4 * P * 3 / NUM_ROUNDS),
    "isoloco": (gossip(lambda: {"algorithm": IsoLoCo(3)}), 2 * 3 / 4 * P * 3 / NUM_ROUNDS),
    # 64 of 4096 entries and 32 of the last 2048, 11 to 12 bits each, to each of the three others.
    "sparseloco": (gossip(lambda: {"algorithm": SparseLoCo(3)}), 3 * (8 + 24 + 108 + 4) * 3 / NUM_ROUNDS),
    # A model that stays as it is has no visible entries: a bit for each entry, and 8 bytes, to each of three others.
    "pulseloco": (gossip(lambda: {"algorithm": PULSELoCo(3)}), 3 * (P / 32 + 8) * 3 / NUM_ROUNDS),
    # 4 bits for each entry, and a float32 for each 32 of them: 5 of 32 bits, to each of the three others.
    "diloco in 4 bits": (gossip(lambda: {"algorithm": DiLoCo(3, compressor=FOUR_BITS)}), 3 * P / 6.4 * 3 / NUM_ROUNDS),
    "streamingdiloco in 4 bits": (
        gossip(lambda: {"algorithm": StreamingDiLoCo(4, fragments=2, compressor=FOUR_BITS)}),
        3 * P / 6.4 * 2.5 / NUM_ROUNDS,
    ),
    "eagerdiloco in 4 bits": (
        gossip(lambda: {"algorithm": EagerDiLoCo(3, compressor=FOUR_BITS)}),
        3 * P / 6.4 * 3 / NUM_ROUNDS,
    ),
    "slowmo": (gossip(lambda: {"algorithm": SlowMo(3)}), 2 * 3 / 4 * P * 3 / NUM_ROUNDS),
    "noloco": (gossip(lambda: {"algorithm": NoLoCo(3)}), P * 3 / NUM_ROUNDS),
    "gasloc": (gossip(lambda: {"algorithm": GASLoC(3), "graph": RING}), 2 * P * 3 / NUM_ROUNDS),
    "dpsgd": (gossip(lambda: {"push_sum": False}), P),
    "qgdsgdm": (gossip(lambda: {"algorithm": QGDSGDm()}), P),
    "d2": (gossip(lambda: {"algorithm": D2()}), 2 * P),
    "exactdiffusion": (gossip(lambda: {"algorithm": ExactDiffusion()}), 2 * P),
    "extra": (gossip(lambda: {"algorithm": EXTRA()}), 2 * P),
    "gradienttracking": (gossip(lambda: {"algorithm": GradientTracking()}), 2 * P * (2 * NUM_ROUNDS - 2) / NUM_ROUNDS),
    # Two vectors to each of two neighbours, in the rounds 0, 3, 6 and 9.
    "kgt": (gossip(lambda: {"algorithm": KGT(3)}), 2 * 2 * P * 4 / NUM_ROUNDS),
    "proxskip": (gossip(lambda: {"algorithm": ProxSkip(0.5)}), 2 * P * SENDING / NUM_ROUNDS),
    "decentlam": (gossip(lambda: {"algorithm": DecentLaM()}), 2 * P),
    "sgp": (gossip(dict), P),
    "osgp": (gossip(lambda: {"overlap": True}), P),
    "choco": (gossip(lambda: {"graph": RING, "gossiper": Choco(TopK(0.01), step_size=0.04)}), 2 * P / 77),
    "deepsqueeze": (gossip(lambda: {"graph": RING, "gossiper": DeepSqueeze(SignNorm(), step_size=0.01)}), 2 * P / 32),
    "moniqua": (gossip(lambda: {"graph": RING, "gossiper": Moniqua(theta=9.0, bits=8)}), 2 * (P / 4 + 8)),
    "powergossip": (gossip(lambda: {"graph": RING, "gossiper": PowerGossip()}), 2 * 4 * (ROWS + COLUMNS) / 2),
    "sparta": (gossip(lambda: {"gossiper": Sparta(0.005)}), 3 * (8 + 16 + 4 * 30)),
    "wagma": (
        lambda module, group: GroupAverageDataParallel(
            module, group_size=2, sync_period=0, wait_avoiding=False, process_group=group
        ),
        P,
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_bytes_per_round_are_those_of_the_page(name: str) -> None:
    make, expected = COSTS[name]

    def body(group: dist.ProcessGroup) -> float:
        model = make(nn.Linear(COLUMNS, ROWS, bias=False), group)
        before = model.comm_stats()["bytes_sent"]
        for _ in range(NUM_ROUNDS):
            model(torch.ones(1, COLUMNS))
        model.flush()
        num_bytes = model.comm_stats()["bytes_sent"] - before
        model.close()
        return num_bytes / NUM_ROUNDS

    torch.manual_seed(0)
    for num_bytes in run_ranks(NUM_RANKS, body):
        assert expected <= num_bytes + 1
        # To each of two neighbours a header, and what rounds a message up; 5 %: the scales of blocks of signs.
        assert num_bytes <= 1.05 * expected + 4 * HEADER


def test_the_default_graph_of_sgp_is_the_one_of_its_page() -> None:
    for n in (4, 6, 8):
        graph = NPeerDynamicDirectedExponentialGraph(n)
        length = (n - 1).bit_length()
        for t in range(2 * length):
            assert graph.out_peers(1, t) == ((1 + 2 ** (t % length)) % n,)


def test_matcha_keeps_to_its_budget() -> None:
    graph = MatchaGraph(nx.complete_graph(6), budget=0.5)
    assert graph.expected_cost == pytest.approx(graph.full_cost / 2, rel=1e-4)
    assert 0 < graph.rho < 1
