"""One side of `benchmarks.bit_equal`: trains each case with the library that is imported, and prints its digest.

    python benchmarks/bit_equal_side.py '["sgp", "diloco, delay"]'

Ranks are threads over Gloo. A digest is of the parameters, buffers and momenta of all ranks after the last step.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as g
from gossip_modules.graph_manager import NetworkXGraph
from gossip_modules.testing import run_ranks

Arguments = dict[str, Any]
"""Keyword arguments of a wrapper."""

NUM_RANKS, NUM_WORKERS, NUM_STEPS = 4, 3, 24
MIDDLE = 13
"""The step before which the model is averaged or loaded; outer methods have a round in flight then, with a delay."""

LEFT_OUT: Mapping[str, str] = {
    "adpsgd": "its pairs average whenever both are free, so its bits depend on time",
    "a2cid2": "its pairs average whenever both are free, so its bits depend on time",
    "dpwa": "its workers fetch the model that a peer serves at that moment, so its bits depend on time",
    "wagma, late": "late ranks contribute an older model, so its bits depend on time; wagma is run without late ranks",
}
"""The methods that have no lockstep, with the reason."""


def matcha_graph(num_ranks: int) -> Any:
    """Random matchings of the complete graph."""
    return g.MatchaGraph(nx.complete_graph(num_ranks), budget=0.6)


def irregular() -> NetworkXGraph:
    """A directed graph on which push-sum weights differ from 1."""
    return NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))


STALE = "staleness 2"
"""The part of the name of a case whose rounds may be late, and are not in the runs that count."""
NODES = "nodes of two"
"""The part of the name of a case whose ranks are processes, as the groups of nodes are made of the default group."""
MIXED: Arguments = {"push_sum": False}
METHODS: Mapping[str, Callable[[], Arguments]] = {
    "ar": dict,
    "dpsgd": lambda: MIXED,
    "sgp": dict,
    "osgp": lambda: {"overlap": True},
    "matcha": lambda: {**MIXED, "graph": matcha_graph},
    "choco": lambda: {**MIXED, "algorithm": g.Choco(g.SignNorm(), step_size=0.4)},
    "deepsqueeze": lambda: {**MIXED, "algorithm": g.DeepSqueeze(g.QSGD(8), step_size=0.5)},
    "moniqua": lambda: {**MIXED, "algorithm": g.Moniqua(theta=8.0)},
    "powergossip": lambda: {**MIXED, "algorithm": g.PowerGossip()},
    "wagma": lambda: {"sync_period": 5, "wait_avoiding": False},
    "localsgd": lambda: {"algorithm": g.LocalSGD(4)},
    "diloco": lambda: {"algorithm": g.DiLoCo(4)},
    "streamingdiloco": lambda: {"algorithm": g.StreamingDiLoCo(4, fragments=2)},
    "eagerdiloco": lambda: {"algorithm": g.EagerDiLoCo(4)},
    "muloco": lambda: {"algorithm": g.MuLoCo(4)},
    "isoloco": lambda: {"algorithm": g.IsoLoCo(4, lr=0.7)},
    "sparseloco": lambda: {"algorithm": g.SparseLoCo(4)},
    "pulseloco": lambda: {"algorithm": g.PULSELoCo(4)},
    "slowmo": lambda: {"algorithm": g.SlowMo(4, inner_lr="optimizer")},
    "noloco": lambda: {"algorithm": g.NoLoCo(3)},
    "gasloc": lambda: {"algorithm": g.GASLoC(3)},
    "qgdsgdm": lambda: {"algorithm": g.QGDSGDm()},
    "d2": lambda: {"algorithm": g.D2()},
    "exactdiffusion": lambda: {"algorithm": g.ExactDiffusion()},
    "extra": lambda: {"algorithm": g.EXTRA()},
    "trimmedmean": lambda: {**MIXED, "algorithm": g.TrimmedMean()},
    "clippedgossip": lambda: {**MIXED, "algorithm": g.ClippedGossip(0.05)},
    "gradienttracking": lambda: {"algorithm": g.GradientTracking()},
    "kgt": lambda: {"algorithm": g.KGT(4)},
    "proxskip": lambda: {"algorithm": g.ProxSkip(0.4)},
    "decentlam": lambda: {"algorithm": g.DecentLaM()},
    "relaysgd": lambda: {**MIXED, "algorithm": g.RelaySGD()},
    "sparta": lambda: {**MIXED, "algorithm": g.Sparta(0.2)},
}
"""The arguments of each method of the registry that has a lockstep, by its name."""


def delayed(own: Arguments) -> Arguments | None:
    """The outer method with a delay of two steps, if the method has delays."""
    algorithm = own.get("algorithm")
    has_delay = hasattr(algorithm, "delay") and not isinstance(algorithm, g.EagerDiLoCo)
    return {"algorithm": replace(algorithm, delay=2)} if has_delay else None  # type: ignore[type-var]


VARIANTS: Mapping[str, Callable[[Arguments], Arguments | None]] = {
    "": lambda own: {},
    "overlap": lambda own: {"overlap": True},
    "delay": delayed,
    "bfloat16": lambda own: {"wire_dtype": torch.bfloat16},
    'rounds="step"': lambda own: {"rounds": "step"},
    "averaged": lambda own: {},
    "resumed": lambda own: {},
    "membership": lambda own: {},
}
"""The variants of each method: more arguments, given the arguments of the method; None: the method has none."""

MIXES = ("dpsgd", "sgp", "osgp", "matcha", "noloco", "gasloc", "decentlam", "qgdsgdm", "d2", "exactdiffusion", "extra")
TRACKING = ("gradienttracking", "kgt", "proxskip")
RULES = ("qgdsgdm", "d2", "exactdiffusion", "extra", *TRACKING, "decentlam", "relaysgd")


def is_variant(method: str, variant: str) -> bool:
    """Whether the method takes the arguments of the variant, and is not this variant itself."""
    if variant == "overlap":
        return method not in ("ar", "osgp", "streamingdiloco", "eagerdiloco", *RULES)
    if variant == "bfloat16":
        return method in (*MIXES, *TRACKING)
    if variant == 'rounds="step"':
        return method != "ar"
    if variant == "resumed":  # the round in flight of EagerDiLoCo ends early in a library that does not save it
        return method != "eagerdiloco"
    return variant != "membership" or method != "wagma"


SINGLE: Mapping[str, Callable[[], Arguments]] = {
    "sgp, directed": lambda: {"graph": irregular()},
    "sgp, directed, overlap": lambda: {"graph": irregular(), "overlap": True},
    "sgp, directed, averaged": lambda: {"graph": irregular()},
    "sgp, directed, resumed": lambda: {"graph": irregular()},
    f"sgp, {STALE}": lambda: {"overlap": True, "max_staleness": 2},
    f"dpsgd, {STALE}": lambda: {**MIXED, "overlap": True, "max_staleness": 2},
    f"diloco, {STALE}": lambda: {"algorithm": g.DiLoCo(4), "overlap": True, "max_staleness": 2},
    f"sgp, {NODES}": lambda: {"nprocs_per_node": 2},
    f"sgp, {NODES}, {STALE}": lambda: {"nprocs_per_node": 2, "overlap": True, "max_staleness": 2},
    f"diloco, {NODES}": lambda: {"nprocs_per_node": 2, "algorithm": g.DiLoCo(4)},
    "sgp, every 3rd step, averages": lambda: {"schedule": g.Schedule(gossip_every=3, average_every=4)},
    "dpsgd, average_until": lambda: {**MIXED, "schedule": g.Schedule(average_until=5, average_every=4)},
    "streamingdiloco, delay 3": lambda: {"algorithm": g.StreamingDiLoCo(4, fragments=3, delay=3)},
    "streamingdiloco, compressed": lambda: {
        "algorithm": g.StreamingDiLoCo(4, fragments=2, delay=1, compressor=g.QSGD(4, bucket_size=32, unbiased=True))
    },
    "diloco, carry": lambda: {"algorithm": g.DiLoCo(4, delay=2, arrival="carry")},
    "diloco, adaptive": lambda: {"algorithm": g.DiLoCo(4, delay=2, arrival="adaptive")},
    "diloco, tokens": lambda: {"algorithm": g.DiLoCo(4, weighted_by="tokens")},
    "slowmo over choco": lambda: {
        "algorithm": g.SlowMo(4, gossip_every=1).over(g.Choco(g.SignNorm(), step_size=0.4)),
    },
    "slowmo over powergossip": lambda: {"algorithm": g.SlowMo(4, gossip_every=1).over(g.PowerGossip())},
    "gasloc over choco": lambda: {"algorithm": g.GASLoC(3, momentum=0).over(g.Choco(g.SignNorm(), step_size=0.4))},
    "dpsgd, ignore": lambda: {**MIXED, "ignore": ["3.bias"], "gossip_buffers": False},
    "sgp, rounds by hand": lambda: {"rounds": "manual"},
    "sgp, accumulated": dict,
    "diloco, accumulated": lambda: {"algorithm": g.DiLoCo(4)},
    "sgp, frozen for some steps": dict,
    "diloco, frozen for some steps": lambda: {"algorithm": g.DiLoCo(4)},
    "sgp, GossipAdamW": dict,
}
"""Further cases, by name."""

QUICK = ("", "overlap", "delay", "membership")
"""The variants of --quick, besides SINGLE."""


def cases() -> dict[str, Callable[[], Arguments | None]]:
    """All cases by name, such as "diloco, delay": functions of their arguments."""

    def make(method: str, variant: str) -> Arguments | None:
        own = METHODS[method]()
        added = VARIANTS[variant](own) if is_variant(method, variant) else None
        return None if added is None else {**own, **added}

    return {
        **{
            f"{method}, {variant}".removesuffix(", "): functools.partial(make, method, variant)
            for method in METHODS
            for variant in VARIANTS
        },
        **SINGLE,
    }


class AppliedLate(Exception):
    """Raised if a round was applied later than in the next step, so that the bits depend on time."""


class RankData:
    """The batches of a rank: inputs [steps, 6, 8] and targets [steps, 6, 5]."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(100 + rank)
        self.x = torch.randn(NUM_STEPS, 6, 8, generator=generator)
        self.y = torch.randn(NUM_STEPS, 6, 5, generator=generator)


def make_model() -> nn.Module:
    """The model with which training begins: matrices, vectors and running statistics, from a seed of their own."""
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 5))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def make_optimizer(case: str, wrapper: nn.Module) -> Any:
    """The optimizer of a case: SGD with momentum, which some methods need, or the method's own."""
    if "GossipAdamW" in case:
        return g.GossipAdamW(wrapper.parameters(), lr=0.01, num_ranks=NUM_RANKS)
    if case.startswith("muloco"):
        return g.MuonAdamW(wrapper, lr=0.02)
    return torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9)


def wrap(case: str, model: nn.Module, **arguments: Any) -> Any:
    """The wrapper of a case."""
    kinds = {"ar": g.AllReduceDataParallel, "wagma": g.GroupAverageDataParallel}
    return kinds.get(case.partition(",")[0], g.GossipDataParallel)(model, **arguments)


@contextmanager
def step_of(case: str, wrapper: Any, optimizer: Any, step: int) -> Iterator[None]:
    """The lines of a user's loop around a step that are special in this case."""
    if "muloco" not in case:
        optimizer.param_groups[0]["lr"] *= 0.5 if step == 9 else 1.0
    if case.endswith("averaged") and step == MIDDLE:
        wrapper.consensus_distance()
        wrapper.average_()
    if "frozen" in case and step in (6, MIDDLE):
        wrapper.module[0].weight.requires_grad_(step == MIDDLE)
    if "tokens" in case:
        wrapper.count_tokens(10 + step % 3)
    yield
    if "by hand" in case:
        wrapper.gossip_step()


def train(case: str, wrapper: Any, optimizer: Any, data: RankData, steps: Iterable[int], pause: float = 0.0) -> None:
    """The user's loop, with so many seconds between two steps."""
    for step in steps:
        time.sleep(pause)
        with step_of(case, wrapper, optimizer, step):
            x, y = data.x[step], data.y[step]
            if "accumulated" in case:
                with wrapper.no_sync():
                    (wrapper(x[:3]) - y[:3]).square().mean().backward()
                x, y = x[3:], y[3:]
            (wrapper(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def tensors_of(wrapper: Any, optimizer: Any) -> list[Tensor]:
    """Parameters, buffers and the state of the optimizer, in the order of the model."""
    state = optimizer.state_dict()["state"]
    kept = [value for k in sorted(state) for _, value in sorted(state[k].items()) if isinstance(value, Tensor)]
    return [x.detach().clone() for x in (*wrapper.module.parameters(), *wrapper.module.buffers(), *kept)]


def train_rank(
    case: str, make: Callable[[], Arguments | None], group: dist.ProcessGroup, pause: float = 0.0
) -> list[Tensor]:
    """Train one rank of a case.

    Raises:
        AppliedLate: a round was applied later than in the next step, because of the load of the machine.
    """

    def wrapped() -> Any:
        return wrap(case, make_model(), **({} if NODES in case else {"process_group": group}), **(make() or {}))

    data, wrapper = RankData(group.rank()), wrapped()
    optimizer = make_optimizer(case, wrapper)
    if case.endswith("resumed"):
        train(case, wrapper, optimizer, data, range(MIDDLE))
        wrapper.flush()  # which a save did too, before it contained rounds in flight
        saved = wrapper.state_dict(), optimizer.state_dict()
        wrapper.close()
        wrapper = wrapped()
        optimizer = make_optimizer(case, wrapper)
        wrapper.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(case, wrapper, optimizer, data, range(MIDDLE, NUM_STEPS))
    else:
        train(case, wrapper, optimizer, data, range(NUM_STEPS), pause)
    getattr(wrapper, "settle", wrapper.flush)()
    ends = tensors_of(wrapper, optimizer)
    is_late = STALE in case and NODES not in case and wrapper.comm_stats()["max_staleness"] > 0
    wrapper.close()
    if is_late:
        raise AppliedLate
    return ends


def train_worker(case: str, make: Callable[[], Arguments | None], store: dist.Store) -> tuple[int, list[Tensor]]:
    """Train one worker of a case in a membership; returns its rank too, as ranks are given in the order of arrival."""
    membership = g.Membership(
        store, min_workers=NUM_WORKERS, max_workers=NUM_WORKERS, timeout=60, min_deadline=60, host="127.0.0.1"
    )
    try:
        wrapper = wrap(case, make_model(), membership=membership, **(make() or {}))
    except BaseException:
        membership.close()
        raise
    optimizer = make_optimizer(case, wrapper)
    membership.track(optimizer=optimizer)
    steps = membership.steps(NUM_STEPS)
    first = next(steps)
    rank, data = membership.rank, RankData(membership.rank)
    train(case, wrapper, optimizer, data, (step for part in ((first,), steps) for step in part))
    getattr(wrapper, "settle", wrapper.flush)()
    ends = tensors_of(wrapper, optimizer)
    wrapper.close()
    return rank, ends


def digest(ranks: Sequence[Sequence[Tensor]]) -> str:
    """The first 24 digits of the SHA-256 of all bits."""
    found = hashlib.sha256()
    for x in (x for tensors in ranks for x in tensors):
        found.update(f"{x.dtype} {tuple(x.shape)}".encode())
        found.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def run_process(cases_: Sequence[str], rank: int, store: str) -> None:
    """Train one rank of some cases in this process; rank 0 prints the digests."""
    dist.init_process_group("gloo", store=dist.FileStore(store, NUM_RANKS), rank=rank, world_size=NUM_RANKS)
    world = dist.group.WORLD
    assert world is not None
    for case in cases_:
        ends: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(ends, train_rank(case, cases()[case], world))
        if rank == 0:
            print(digest(ends), flush=True)
    dist.destroy_process_group()


def run_processes(names: Sequence[str]) -> list[str]:
    """The digests of cases whose ranks are processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), json.dumps(names)]
        processes = [
            subprocess.Popen([*command, str(rank), f"{folder}/store"], stdout=subprocess.PIPE, text=True)
            for rank in range(NUM_RANKS)
        ]
        printed = [process.communicate(timeout=300)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError(f"a rank of {names} ended with an error; it is above")
        return printed[0].split()


def run_workers(case: str) -> str:
    """The digest of a case of a membership."""
    store = dist.HashStore()
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        futures = [pool.submit(train_worker, case, cases()[case], store) for _ in range(NUM_WORKERS)]
    return digest([ends for _, ends in sorted((future.result() for future in futures), key=lambda end: end[0])])


def run_threads(names: Sequence[str], pause: float = 0.0) -> list[str]:
    """The digests of cases whose ranks are threads of one group."""

    def body(group: dist.ProcessGroup) -> list[list[Tensor]]:
        return [train_rank(case, cases()[case], group, pause) for case in names]

    return [digest(ends) for ends in zip(*run_ranks(NUM_RANKS, body), strict=True)]


def run_punctual(case: str) -> str:
    """The digest of a case whose rounds have all come before the next step, as the ranks pause between steps."""
    for pause in (0.02, 0.05, 0.1, 0.2, 0.4):
        with suppress(AppliedLate):
            return run_threads([case], pause)[0]
    raise RuntimeError(f"{case}: rounds take longer than 0.4 s; the load of the machine is too high")


def run_all(names: Sequence[str]) -> Iterator[tuple[Sequence[str], list[str]]]:
    """The digests of cases, some at a time; a case with an error has its text in place of a digest."""
    every = cases()
    names = [case for case in names if every[case]() is not None]
    stale, members, nodes = ([case for case in names if part in case] for part in (STALE, "membership", NODES))
    threads = [case for case in names if case not in {*stale, *members, *nodes}]
    batches: list[tuple[Callable[[Sequence[str]], list[str]], Sequence[str]]] = []
    batches += [(run_threads, list(part)) for _, part in groupby(threads, lambda case: case.partition(",")[0])]
    batches += [(lambda part: [run_punctual(part[0])], [case]) for case in stale if case not in nodes]
    batches += [(lambda part: [run_workers(part[0])], [case]) for case in members]
    batches += [(run_processes, nodes)] if nodes else []
    for run, part in batches:
        try:
            yield part, run(part)
        except Exception as error:  # noqa: BLE001 - the other cases are compared all the same
            for case in part:
                yield [case], [failed(run, case) if len(part) > 1 else text_of(error)]


def failed(run: Callable[[Sequence[str]], list[str]], case: str) -> str:
    """The digest of a case that is run alone, or the text of its error."""
    try:
        return run([case])[0]
    except Exception as error:  # noqa: BLE001 - see `run_all`
        return text_of(error)


def text_of(error: Exception) -> str:
    """An error in one line; its traceback is printed."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def main() -> None:
    """Print a line of JSON, [case, digest, seconds], for each case."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        run_process(names, int(sys.argv[2]), sys.argv[3])
        return
    start = time.perf_counter()
    for part, found in run_all(names):
        seconds, start = time.perf_counter() - start, time.perf_counter()
        for case, value in zip(part, found, strict=True):
            print(json.dumps([case, value, round(seconds / len(part), 2)]), flush=True)


if __name__ == "__main__":
    main()
