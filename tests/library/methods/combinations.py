"""Every method that runs in rounds with every feature of `GossipDataParallel`: which combinations train.

    python -m tests.library.methods.combinations > docs/methods/combinations.md

measures all combinations and prints the page. ROWS, COLUMNS and `arguments` alone say with which arguments of the
wrapper a combination is made.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import networkx as nx
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossip_modules import (
    D2,
    EXTRA,
    KGT,
    QSGD,
    Choco,
    ClippedGossip,
    DecentLaM,
    DeepSqueeze,
    DiLoCo,
    EagerDiLoCo,
    ExactDiffusion,
    GASLoC,
    GossipDataParallel,
    GradientTracking,
    IsoLoCo,
    LocalSGD,
    MatchaGraph,
    Membership,
    Moniqua,
    MuLoCo,
    NoLoCo,
    PowerGossip,
    ProxSkip,
    PULSELoCo,
    QGDSGDm,
    RelaySGD,
    Schedule,
    SlowMo,
    SparseLoCo,
    Sparta,
    StreamingDiLoCo,
    TrimmedMean,
)
from gossip_modules.extend import Algorithm
from gossip_modules.methods import METHODS
from gossip_modules.rounds.periodic import Periodic
from tests.harness.processes import run_processes
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten

Arguments: TypeAlias = dict[str, Any]
"""Keyword arguments of GossipDataParallel, made anew for each rank."""

# --- What a combination is ------------------------------------------------------------------------------------------


def matcha_graph(num_ranks: int) -> MatchaGraph:
    """Random matchings of the complete graph."""
    return MatchaGraph(nx.complete_graph(num_ranks), budget=0.8)


def choco() -> Choco:
    """CHOCO with 8 bits per entry, whose effect a dozen steps show."""
    return Choco(QSGD(8), step_size=0.8)


ROWS: Mapping[str, Callable[[], Arguments]] = {
    "dpsgd": lambda: {"push_sum": False},
    "sgp": dict,
    "osgp": lambda: {"overlap": True},
    "pga": lambda: {"push_sum": False, "schedule": Schedule(average_every=3)},
    "localsgd": lambda: {"algorithm": LocalSGD(2)},
    "matcha": lambda: {"push_sum": False, "graph": matcha_graph},
    "choco": lambda: {"push_sum": False, "algorithm": choco()},
    "deepsqueeze": lambda: {"push_sum": False, "algorithm": DeepSqueeze(QSGD(8), step_size=0.5)},
    "moniqua": lambda: {"push_sum": False, "algorithm": Moniqua(theta=4.0)},
    "powergossip": lambda: {"push_sum": False, "algorithm": PowerGossip()},
    "sparta": lambda: {"push_sum": False, "algorithm": Sparta(0.7)},
    "clippedgossip": lambda: {"push_sum": False, "algorithm": ClippedGossip(2.0)},
    "trimmedmean": lambda: {"push_sum": False, "algorithm": TrimmedMean(0.3)},
    "relaysgd": lambda: {"push_sum": False, "algorithm": RelaySGD()},
    "diloco": lambda: {"algorithm": DiLoCo(2, momentum=0.3)},
    "streamingdiloco": lambda: {"algorithm": StreamingDiLoCo(2, momentum=0.3)},
    "eagerdiloco": lambda: {"algorithm": EagerDiLoCo(2, momentum=0.3)},
    "muloco": lambda: {"algorithm": MuLoCo(2, momentum=0.3)},
    "isoloco": lambda: {"algorithm": IsoLoCo(2, lr=0.7, momentum=0.3)},
    "sparseloco": lambda: {"algorithm": SparseLoCo(2)},
    "pulseloco": lambda: {"algorithm": PULSELoCo(2, momentum=0.3)},
    "slowmo": lambda: {"algorithm": SlowMo(2, momentum=0.3)},
    "noloco": lambda: {"algorithm": NoLoCo(1, momentum=0.3)},
    "gasloc": lambda: {"algorithm": GASLoC(1, momentum=0.3)},
    "qgdsgdm": lambda: {"algorithm": QGDSGDm()},
    "d2": lambda: {"algorithm": D2()},
    "exactdiffusion": lambda: {"algorithm": ExactDiffusion()},
    "extra": lambda: {"algorithm": EXTRA()},
    "gradienttracking": lambda: {"algorithm": GradientTracking()},
    "kgt": lambda: {"algorithm": KGT(2)},
    "proxskip": lambda: {"algorithm": ProxSkip(0.7)},
    "decentlam": lambda: {"algorithm": DecentLaM()},
}
"""The arguments of each method, with settings whose effect a dozen steps show."""

TITLES = {"pga": "Gossip-PGA"}
"""The titles of the methods that have no entry in METHODS: each is a schedule of D-PSGD."""


def schedule_of(own: Arguments, **counts: int) -> Arguments:
    """The method's own schedule with other counts."""
    return {"schedule": replace(own.get("schedule", Schedule()), **counts)}


COLUMNS: Mapping[str, Callable[[Arguments], Arguments]] = {
    "plain": lambda own: {},
    "overlap": lambda own: {"overlap": True},
    "staleness 2": lambda own: {"overlap": True, "max_staleness": 2},
    "bfloat16 messages": lambda own: {"wire_dtype": torch.bfloat16},
    "int8 messages": lambda own: {"wire_dtype": torch.int8},
    "every 2nd step": lambda own: schedule_of(own, gossip_every=2),
    "average every 4th round": lambda own: schedule_of(own, average_every=4),
    "+ PowerGossip": lambda own: {"algorithm": PowerGossip()},
    "+ CHOCO": lambda own: {"algorithm": choco()},
    "+ D2": lambda own: {"algorithm": D2()},
    "+ SlowMo": lambda own: {"algorithm": SlowMo(2, momentum=0.3, gossip_every=1)},
    "MATCHA graph": lambda own: {"graph": matcha_graph},
    "membership": lambda own: {},
    "nodes of two": lambda own: {"nprocs_per_node": 2},
}
"""The features: the arguments that each adds, given the arguments of a method."""

BELOW = ("+ PowerGossip", "+ CHOCO")
"""The features that are an algorithm by which the method mixes; the others are over the method."""

MEMBERSHIP, NODES = "membership", "nodes of two"
AMONG_RANKS = tuple(column for column in COLUMNS if column not in (MEMBERSHIP, NODES))


def arguments(row: str, column: str) -> Arguments:
    """The arguments of `GossipDataParallel` for a method with a feature; a second algorithm is over or below the first.

    Raises:
        ValueError: the two algorithms are none together.
    """
    own = ROWS[row]()
    added = COLUMNS[column](own)
    if "algorithm" not in own or "algorithm" not in added:
        return {**own, **added}
    first, second = own["algorithm"], added["algorithm"]
    if type(first) is type(second):  # the feature is the method
        return own
    outer, inner = (first, second) if column in BELOW else (second, first)
    return {**own, "algorithm": outer.over(inner)}


# --- Training ---------------------------------------------------------------------------------------------------------

NUM_RANKS, NUM_STEPS = 4, 12
SECONDS = 15.0  # of any wait
SETTLED = 20  # steps of the workers that remain, after one has left


class Trained(NamedTuple):
    """The result of a training on one rank."""

    distance: float
    """Consensus distance at the end."""
    alone: float
    """The same without communication."""
    before: float
    """Mean loss over the data of all ranks, of the first model."""
    after: float
    """The same loss of this rank's last model."""
    least: int = 0
    """The rounds of the entry of the model with the fewest rounds, counted by its changes between optimizer steps."""
    asked: int = 0
    """The rounds of each entry that the algorithm asks for, if it chooses their steps itself."""


def model() -> nn.Module:
    """A matrix and a vector, all zero."""
    module = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


@lru_cache
def data(rank: int) -> tuple[Tensor, Tensor]:
    """Inputs [8, 4] and targets [8, 3] of a rank; the best bias differs from rank to rank."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank + 1))
    return x, x @ torch.linspace(-1, 1, 12).view(4, 3) + (rank - 1.5) / 2


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, which some methods require."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def train_step(module: nn.Module, optimizer: torch.optim.Optimizer, ranks: Iterable[int]) -> None:
    """One step on the data of these ranks."""
    loss = torch.stack([mse_loss(module(x), y) for x, y in map(data, ranks)]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def loss_of(module: nn.Module) -> float:
    """The mean loss over the data of all ranks."""
    return sum(mse_loss(module(x), y).item() for x, y in map(data, range(NUM_RANKS))) / NUM_RANKS


@lru_cache
def distance_alone(nodes: tuple[tuple[int, ...], ...], num_steps: int) -> float:
    """The consensus distance of nodes, each given by its ranks, that have trained without communication."""
    models = []
    for ranks in nodes:
        module = model()
        optimizer = optimizer_of(module)
        for _ in range(num_steps):
            train_step(module, optimizer, ranks)
        models.append(flatten(module))
    x = torch.stack(models)
    return (x - x.mean(dim=0)).square().sum(dim=1).mean().sqrt().item()


def close(wrapper: GossipDataParallel, nodes: tuple[tuple[int, ...], ...], num_steps: int) -> Trained:
    """Collective: close a wrapper that has trained so many steps, among these nodes; returns the result."""
    wrapper.settle()
    distance, after = wrapper.consensus_distance(), loss_of(wrapper)
    wrapper.close()
    return Trained(distance, distance_alone(nodes, num_steps), loss_of(model()), after)


def rounds_of(row: str, column: str) -> int:
    """The least number of rounds of each entry in a training; 0: the algorithm does not choose their steps itself."""
    own = arguments(row, column)
    algorithm = own.get("algorithm")
    outer = algorithm.parts[0] if isinstance(algorithm, Algorithm) else None
    if not isinstance(outer, Periodic):
        return 0
    assert isinstance(outer.delay, int)
    late = own.get("max_staleness", 0) + 1 if own.get("overlap") else outer.delay
    # The first round of a fragment begins after `sync_every` steps at the latest.
    return (NUM_STEPS - 1 - min(late, outer.sync_every)) // outer.sync_every


def train(rank: int, row: str, column: str, group: dist.ProcessGroup | None) -> Trained | str:
    """Collective: train by a method with a feature; returns the result, or the text of the refusal."""
    try:
        wrapper = GossipDataParallel(model(), process_group=group, timeout=SECONDS, **arguments(row, column))
    except ValueError as error:
        return str(error)
    optimizer = optimizer_of(wrapper)
    rounds = torch.zeros_like(flatten(wrapper.module), dtype=torch.int64)
    last = flatten(wrapper.module)

    def count(*_: object) -> None:
        rounds.add_(flatten(wrapper.module) != last)

    wrapper.module.register_forward_pre_hook(count)  # after the round of the step
    for _ in range(NUM_STEPS):
        last = flatten(wrapper.module)
        train_step(wrapper, optimizer, [rank])
    nodes = ((0, 1), (2, 3)) if column == NODES else tuple((rank,) for rank in range(NUM_RANKS))
    least = int(rounds.min())
    return close(wrapper, nodes, NUM_STEPS)._replace(least=least, asked=rounds_of(row, column))


def train_in_membership(rank: int, row: str, store: dist.Store) -> Trained | str | None:
    """Train as a worker of a membership; the last worker leaves midway and returns None, the others go on."""
    membership = Membership(
        store, min_workers=NUM_RANKS, max_workers=NUM_RANKS, timeout=SECONDS, min_deadline=SECONDS, host="127.0.0.1"
    )
    try:
        wrapper = GossipDataParallel(model(), membership=membership, **arguments(row, MEMBERSHIP))
    except ValueError as error:
        membership.close()
        return str(error)
    optimizer = optimizer_of(wrapper)
    membership.track(optimizer=optimizer)
    last, leaver = 1 << 30, NUM_RANKS - 1
    for step in membership.steps(last):
        if membership.world_size < NUM_RANKS:
            last = min(last, step + SETTLED)
        train_step(wrapper, optimizer, [rank])
        if rank == leaver and step == NUM_STEPS // 2:
            membership.leave()
        if step == last:
            return close(wrapper, tuple((rank,) for rank in range(leaver)), last + 1)
        time.sleep(0.001)  # the next generation is formed meanwhile
    wrapper.close()
    return None


# --- Measuring --------------------------------------------------------------------------------------------------------

WORKS, FAILS = "yes", "fails"
Found: TypeAlias = dict[str, str]
"""The cells of a method by feature: WORKS, the reason of a refusal, or a text that begins with FAILS."""


def verdict(results: Sequence[Trained | str]) -> str:
    """The content of a cell, given the results of all ranks."""
    if any(isinstance(result, str) for result in results):
        said = {result for result in results if isinstance(result, str)}
        parts = re.fullmatch(r".*?got .+?, expected (.+?(?:[:;] |, since ).+)", min(said), re.DOTALL)
        if len(said) > 1 or not all(isinstance(result, str) for result in results) or parts is None:
            return f"{FAILS}: got {results}, expected that all refuse alike, with got, expected and a reason"
        return parts[1]
    for result in results:
        assert isinstance(result, Trained)
        if not (result.distance < 0.9 * result.alone and result.after < 0.9 * result.before):
            return f"{FAILS}: got {result}, expected ranks closer than alone and a lower loss"
        if result.least < result.asked:
            return f"{FAILS}: got {result.least} rounds of a part of the model, expected {result.asked}"
    return WORKS


def measure_among_ranks(row: str, columns: Sequence[str] = AMONG_RANKS) -> Found:
    """The cells of a method among ranks that stay, which train in one group for all features."""

    def body(group: dist.ProcessGroup) -> list[Trained | str]:
        return [train(group.rank(), row, column, group) for column in columns]

    try:
        return {column: verdict(results) for column, *results in zip(columns, *run_ranks(NUM_RANKS, body))}
    except Exception as error:  # noqa: BLE001 - the cell holds every error
        if len(columns) == 1:
            return {columns[0]: f"{FAILS}: {type(error).__name__}: {error}"}
        return {column: text for one in columns for column, text in measure_among_ranks(row, [one]).items()}


def measure_in_membership(row: str) -> Found:
    """The cell of a method in a membership that one worker leaves."""
    store = dist.HashStore()
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        futures = [pool.submit(train_in_membership, rank, row, store) for rank in range(NUM_RANKS)]
    if errors := [error for future in futures if (error := future.exception()) is not None]:
        return {MEMBERSHIP: f"{FAILS}: {type(errors[0]).__name__}: {errors[0]}"}
    return {MEMBERSHIP: verdict([result for future in futures if (result := future.result()) is not None])}


def failures(found: Found) -> Found:
    """Those of the combinations that neither train nor are refused with a reason."""
    return {column: text for column, text in found.items() if text.startswith(FAILS)}


def train_in_nodes(rank: int, rows: Sequence[str]) -> list[tuple[float, ...] | str]:
    """Collective, in a process: train by each method in turn, with nodes of two; results as plain values."""
    results = (train(rank, row, NODES, None) for row in rows)
    return [result if isinstance(result, str) else tuple(result) for result in results]


def measure_in_nodes(rows: Sequence[str] = tuple(ROWS)) -> dict[str, Found]:
    """The cell of each method among nodes of two processes."""
    outcomes = run_processes(NUM_RANKS, train_in_nodes, list(rows), expect_result=False)
    if errors := [outcome.error or f"exit code {outcome.exit_code}" for outcome in outcomes if outcome.exit_code]:
        if len(rows) == 1:
            return {rows[0]: {NODES: f"{FAILS}: {errors[0]}"}}
        return {row: found for one in rows for row, found in measure_in_nodes([one]).items()}
    return {
        row: {NODES: verdict([result if isinstance(result, str) else Trained(*result) for result in results])}
        for row, *results in zip(rows, *(outcome.result for outcome in outcomes))
    }


# --- The page ---------------------------------------------------------------------------------------------------------

HEAD = """\
# Methods and features

The table has every method that runs in rounds with every feature of `GossipDataParallel`. "yes" says that a test trains
four ranks with both: their models come closer than without communication, the loss falls, and each part of the model
has as many rounds as an algorithm with `sync_every` asks for. In the column "membership" one of the four workers leaves
during the training. A number says that the wrapper refuses the combination
at construction with a `ValueError`, and gives the reason in the list below.

Of {total} combinations {works} work and {refused} are refused; with nodes of two processes {node_works} of {rows} work.
"""

FOOT = """
`python -m tests.library.methods.combinations` measures all combinations and prints this page. A test compares the page
with the measurement.
"""


def title_of(row: str) -> str:
    """The title of a method, linked to its page if it has one."""
    return f"[{METHODS[row].title}]({row}.md)" if row in METHODS else TITLES[row]


def page_of(found: Mapping[str, Found]) -> str:
    """The page, given the cells of each method."""
    reasons = list(dict.fromkeys(text for cells in found.values() for text in cells.values() if text != WORKS))
    rows = [["method", *COLUMNS], ["---", *("---" for _ in COLUMNS)]]
    for row, cells in found.items():
        texts = [cells[column] for column in COLUMNS]
        rows.append([title_of(row), *(text if text == WORKS else str(reasons.index(text) + 1) for text in texts)])
    works = sum(text == WORKS for cells in found.values() for text in cells.values())
    node_works = sum(cells[NODES] == WORKS for cells in found.values())
    total = len(found) * (len(COLUMNS) - 1)
    counts = {"works": works - node_works, "node_works": node_works, "total": total, "rows": len(found)}
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    listed = "\n".join(f"{number}. expected {reason}" for number, reason in enumerate(reasons, 1))
    return f"{HEAD.format(refused=total - counts['works'], **counts)}\n{table}\n\n## Reasons\n\n{listed}\n{FOOT}"


def found_on(page: str) -> dict[str, Found]:
    """The cells that a page states: the inverse of `page_of`."""
    reasons = dict(re.findall(r"^(\d+)\. expected (.+)$", page, re.MULTILINE))
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")][2:]
    names = {title_of(row): row for row in ROWS}
    return {
        names[title]: {column: reasons.get(text, text) for column, text in zip(COLUMNS, texts, strict=True)}
        for title, *texts in cells
    }


def measure_all() -> Iterator[tuple[str, Found]]:
    """Each method with its cells, measured."""
    in_nodes = measure_in_nodes()
    for row in ROWS:
        yield row, {**measure_among_ranks(row), **measure_in_membership(row), **in_nodes[row]}


def main() -> int:
    """Print the page, or the combinations that fail; returns the exit code."""
    found = dict(measure_all())
    failed = [f"{row}, {column}: {text}" for row, cells in found.items() for column, text in failures(cells).items()]
    print("\n".join(failed) if failed else page_of(found), end="")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
