"""Print a plan of MATCHA: matchings, probabilities, alpha and rho, compared with D-PSGD.

    python -m gossip_modules.matcha --graph 0 --budget 0.5
    python -m gossip_modules.matcha --nodes 16 --radius 0.4 --seed 1 --budget 0.3 --output plan.json
    python -m gossip_modules.matcha --edges links.txt --budget-seconds 0.02

`--output` writes the plan, which `MatchaGraph.from_plan("plan.json")` and the training scripts use as it is:

    torchrun --nproc-per-node 8 -m train.gossip_sgd --recipe matcha --plan plan.json

Both use the probabilities and alpha of the row MATCHA. The file also holds rho as a function of the budget, for
`python -m visualization.matcha`. A file of links has a line "u v" or "u v seconds" per link; with seconds the budget is
a share of time. rho bounds the factor by which the squared distance of the ranks from their average shrinks per round,
in expectation. The joint optimum over p and alpha is left out for more than 64 ranks.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

from ..graph_manager.matchings import Edge, Matching, matchings_of, predefined_matchings, world_size
from ..mixing_manager.laplacians import dpsgd_weight, mixing_weight, periodic_dpsgd_weight
from .planning import ActivationPlan, activation_probabilities, budget_limit, joint_probabilities, matching_costs

JOINT = "MATCHA, p and alpha jointly"
MAX_JOINT = 64  # ranks; for more of them the joint optimum takes minutes and is left out
_LINKS_WIDTH = 70
_RADIUS = 0.4  # the default radius of a geometric graph


class PlannedGraph(NamedTuple):
    """The graph that a plan is made for, with seconds per link and positions (x, y) per rank; None if unknown."""

    name: str
    matchings: tuple[Matching, ...]
    costs: dict[Edge, float] | None = None
    positions: list[list[float]] | None = None


def methods(base: PlannedGraph, share: float) -> dict[str, ActivationPlan]:
    """The plan of each method that spends this share, above 0 and at most 1, of the cost of all matchings.

    D-PSGD uses them all whatever the share. The joint optimum is left out for more than `MAX_JOINT` ranks.
    """
    matchings = base.matchings
    p, equal = activation_probabilities(matchings, share, costs=base.costs), np.full(len(matchings), share)
    found = {
        "D-PSGD": ActivationPlan(np.ones(len(matchings)), *dpsgd_weight(matchings)),
        "periodic D-PSGD": ActivationPlan(equal, *periodic_dpsgd_weight(matchings, share)),
        "equal p": ActivationPlan(equal, *mixing_weight(matchings, equal)),
        "MATCHA": ActivationPlan(p, *mixing_weight(matchings, p)),
    }
    if world_size(matchings) <= MAX_JOINT:
        found[JOINT] = joint_probabilities(matchings, share, costs=base.costs)
    return found


def describe(base: PlannedGraph, share: float, plans: Mapping[str, ActivationPlan]) -> str:
    """The plans for this share of the cost of all matchings, as a text with two tables."""
    matchings = base.matchings
    costs = matching_costs(matchings, base.costs)
    unit = "matchings" if base.costs is None else "seconds"
    ranks = [rank for matching in matchings for edge in matching for rank in edge]
    max_degree = int(np.bincount(ranks).max())
    lines = [
        f"{base.name}: {world_size(matchings)} ranks, {len(ranks) // 2} links, max degree {max_degree}, "
        f"{len(matchings)} matchings",
        f"budget: {share:.6g} of the full schedule = {share * costs.sum():.6g} {unit} per round",
        "",
        f"{'matching':>8} {'cost':>10} {'p':>9} {'joint p':>9}  links",
    ]
    for index, matching in enumerate(matchings):
        links = textwrap.shorten(" ".join(f"{u}-{v}" for u, v in matching), _LINKS_WIDTH, placeholder=" ...")
        if links.endswith("..."):
            links += f" ({len(matching)})"
        joint_p = f"{plans[JOINT].probabilities[index]:.6f}" if JOINT in plans else "-"
        p = plans["MATCHA"].probabilities[index]
        lines.append(f"{index:>8} {costs[index]:>10.4g} {p:>9.6f} {joint_p:>9}  {links}")
    lines += ["", f"{'method':<28} {unit + ' per round':>19} {'alpha':>9} {'rho':>9}"]
    lines += [f"{name:<28} {q @ costs:>19.6g} {alpha:>9.6f} {rho:>9.6f}" for name, (q, alpha, rho) in plans.items()]
    return "\n".join(lines)


def as_json(base: PlannedGraph, share: float, plans: Mapping[str, ActivationPlan], *, num_budgets: int) -> str:
    """The plans as JSON, with rho at `num_budgets` budgets up to the cost of all matchings."""
    shares = [(i + 1) / num_budgets for i in range(num_budgets)]
    curves = [methods(base, each) for each in shares]
    joint = plans.get(JOINT)
    return json.dumps(
        {
            "name": base.name,
            "budget": share,
            "matchings": base.matchings,
            "costs": matching_costs(base.matchings, base.costs).tolist(),
            "positions": base.positions,
            **_as_dict(plans["MATCHA"]),
            "joint": None if joint is None else _as_dict(joint),
            "dpsgd": {"alpha": plans["D-PSGD"].alpha, "rho": plans["D-PSGD"].rho},
            "budgets": shares,
            "rhos": {name: [curve[name].rho for curve in curves] for name in plans if curves and name != "D-PSGD"},
        },
        indent=1,
    )


def _as_dict(plan: ActivationPlan) -> dict[str, Any]:
    return {**plan._asdict(), "probabilities": plan.probabilities.tolist()}


def read_links(path: Path) -> PlannedGraph:
    """The graph of a file with a line "u v" or "u v seconds" per link; `#` starts a comment.

    Raises:
        ValueError: a line is neither, only some links have seconds, or the graph of the ranks 0..n-1 is not connected.
    """
    costs: dict[Edge, float] = {}
    links: list[Edge] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            u, v = sorted(map(int, words[:2]))
            seconds = list(map(float, words[2:]))
        except ValueError:
            seconds = [0.0, 0.0]
        if len(seconds) > 1 or (u, v) in links:
            raise ValueError(f'{path}:{number}: got {line!r}, expected a new link as "u v" or "u v seconds".')
        links.append((u, v))
        if seconds:
            costs[u, v] = seconds[0]
    if not links:
        raise ValueError(f'{path}: got no links, expected a line "u v" or "u v seconds" for each.')
    if costs and len(costs) < len(links):
        missing = [f"{u} {v}" for u, v in links if (u, v) not in costs]
        raise ValueError(f"{path}: got no seconds for {missing}, expected them for all links or for none.")
    return PlannedGraph(path.name, matchings_of(nx.Graph(links), costs=costs or None), costs or None)


def geometric(num_ranks: int, radius: float, seed: int) -> PlannedGraph:
    """Ranks at random positions in the unit square, with a link between those that are closer than `radius`.

    Raises:
        ValueError: the graph is not connected, or has no links.
    """
    if num_ranks < 2 or not radius > 0:
        raise ValueError(
            f"got {num_ranks} nodes and radius {radius:g}, expected 2 nodes or more and a radius above 0: there is no "
            "link to plan."
        )
    graph = nx.random_geometric_graph(num_ranks, radius, seed=seed)
    positions = [list(graph.nodes[rank]["pos"]) for rank in range(num_ranks)]
    return PlannedGraph(f"geometric graph, radius {radius:g}", matchings_of(graph), positions=positions)


def make_parser() -> argparse.ArgumentParser:
    """The options of this command."""
    parser = argparse.ArgumentParser(
        prog="python -m gossip_modules.matcha",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--graph", type=int, help="predefined base graph, 0 to 5")
    which.add_argument("--nodes", type=int, help="ranks of a random geometric graph")
    which.add_argument("--edges", type=Path, help="file of links")
    parser.add_argument("--radius", type=float, help=f"radius of the geometric graph (default: {_RADIUS})")
    parser.add_argument("--seed", type=int, help="seed of the geometric graph (default: 0)")
    budgets = parser.add_mutually_exclusive_group(required=True)
    budgets.add_argument("--budget", type=float, help="share of the time of the full schedule, above 0 up to 1")
    budgets.add_argument("--budget-seconds", type=float, help="expected seconds per round")
    parser.add_argument("--output", type=Path, help="JSON file for the plan")
    parser.add_argument(
        "--num-budgets", type=int, default=20, help="points of rho against budget in the JSON file (default: 20)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plan that the command line asks for."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.nodes is None and (options.radius, options.seed) != (None, None):
        parser.error("got --radius or --seed without --nodes, expected them with it: they shape the geometric graph")
    if options.num_budgets < 0:
        parser.error(f"got --num-budgets {options.num_budgets}, expected 0 or more")
    if options.output is not None and (options.output.is_dir() or not options.output.parent.is_dir()):
        parser.error(f"got --output {options.output}, expected a file in a folder that exists; make the folder first")
    try:
        if options.graph is not None:
            base = PlannedGraph(f"base graph {options.graph}", predefined_matchings(options.graph))
        elif options.nodes is not None:
            base = geometric(options.nodes, _RADIUS if options.radius is None else options.radius, options.seed or 0)
        else:
            base = read_links(options.edges)
        costs = matching_costs(base.matchings, base.costs)
        limit = budget_limit(costs, options.budget, options.budget_seconds, has_costs=base.costs is not None)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    share = limit / float(costs.sum())
    plans = methods(base, share)
    print(describe(base, share, plans))
    if options.output is not None:
        options.output.write_text(as_json(base, share, plans, num_budgets=options.num_budgets), encoding="utf-8")
        print(f"\nwritten: {options.output}\ntrain with it: --recipe matcha --plan {options.output}")


if __name__ == "__main__":
    main()
