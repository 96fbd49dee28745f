"""Claims about training beside workers that send wrong models."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.studies.attacks import ATTACKS, CASES, D_PSGD, NONE, PLACES, RADII, TRIMMED
from benchmarks.studies.ends import trainings
from benchmarks.tables import table

LIMIT = 1.0
"""The points below D-PSGD without attackers that count as unharmed."""
SCORES = ("averaged", "worst")
"""The accuracies of a training: of the averaged honest model, and of the worst honest worker."""


def attack_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the end of each training but for its seed, in the mean over seeds.

    Returns:
        graph, place, attack, rule, seeds; averaged and worst, the accuracies in percent of the averaged honest model
        and of the worst honest worker; averaged_gap and worst_gap, their points below those of D-PSGD without
        attackers on the same graph, with equal seeds; radius, of ClippedGossip.
    """
    last = trainings(rows)
    last = last.assign(averaged=100 - last["test"], worst=100 - last["worst_test"])
    names = ["graph", "place", "attack", "rule"]
    parts = pd.DataFrame([[getattr(CASES[name], each) for each in names] for name in last["method"]], last.index, names)
    last = last.join(parts)
    bases = last[(last["attack"] == NONE) & (last["rule"] == D_PSGD)].set_index(["graph", "seed"])[[*SCORES]]
    last = last.join(bases.add_suffix("_base"), on=["graph", "seed"])
    gaps = {f"{score}_gap": last[f"{score}_base"] - last[score] for score in SCORES}
    radius = last["plan"].str.extract(r"radius=([\d.e-]+)", expand=False).astype(float)
    found = last.assign(**gaps, radius=radius).groupby(names, sort=False)
    return found.agg(
        seeds=("seed", "nunique"), radius=("radius", "first"), **{name: (name, "mean") for name in (*SCORES, *gaps)}
    ).reset_index()


def unharmed(found: pd.DataFrame, rule: str, graph: str) -> tuple[int, int]:
    """Return how many attacks on a graph leave the worst honest worker within LIMIT by a rule, and how many there are.

    Args:
        found: of `attack_ends`.
        rule: the rule.
        graph: the graph.
    """
    own = found[(found["rule"] == rule) & (found["graph"] == graph) & (found["attack"] != NONE)]
    return int((own["worst_gap"] <= LIMIT).sum()), len(own)


def worst_case(found: pd.DataFrame, rule: str, graph: str) -> pd.Series:
    """Return the attack on a graph that leaves the worst honest worker the furthest behind by a rule."""
    own = found[(found["rule"] == rule) & (found["graph"] == graph) & (found["attack"] != NONE)]
    return own.loc[own["worst_gap"].idxmax()]


def in_words(row: pd.Series) -> str:
    """Return an attack with its attackers, such as "2 apart (noise)"."""
    return f"{row['place']} ({row['attack']})"


def by_rules(rows: pd.DataFrame, rules: Sequence[str]) -> str:
    """Return the accuracies of the worst honest worker by rules, those of D-PSGD in brackets, and a summary.

    Args:
        rows: of attacks.csv.
        rules: the rules, which differ by their radius if there are several.
    """
    found = attack_ends(rows)
    cells = found.set_index(["graph", "place", "attack", "rule"])
    lines, texts = list[dict[str, str]](), list[str]()
    for graph, places in PLACES.items():
        for rule in rules:
            own, base = (cells.loc[(graph, "", NONE, each)] for each in (rule, D_PSGD))
            radius = f"{own['radius']:g}"
            for place in places:
                line = {"graph": graph, "radius": radius, "place": place}
                for attack in ATTACKS:
                    worst, plain = (cells.loc[(graph, place, attack, each), "worst"] for each in (rule, D_PSGD))
                    line[attack] = f"{worst:.1f} ({plain:.1f})"
                lines.append(line)
            (near, total), last = unharmed(found, rule, graph), worst_case(found, rule, graph)
            by = f" with the radius {radius}" if rule in RADII else ""
            texts.append(
                f"On the {graph} graph{by} it reaches {own['worst']:.1f} % without attackers, and D-PSGD "
                f"{base['worst']:.1f}. In {near} of {total} attacks it stays within a point of that; the worst, "
                f"{in_words(last)}, takes {last['worst_gap']:.1f} points."
            )
    names = {"graph": "graph", "radius": "radius", "place": "attackers"}
    heads = {name: (head, "s") for name, head in names.items() if name != "radius" or {*rules} & {*RADII}}
    columns = {**heads, **{attack: (attack, "s") for attack in ATTACKS}}
    return f"{table(pd.DataFrame(lines), columns)}\n\n{textwrap.fill(' '.join(texts), 118)}"


PAGES: Mapping[str, Sequence[str]] = {"clippedgossip": tuple(RADII), "trimmedmean": (TRIMMED,)}
"""The rules on the page of a method."""
ATTACK_CLAIMS: Mapping[str, Claim] = {
    slug: Claim(
        ("attacks.csv",),
        f"the last step: 100 less worst_test by {', '.join(rules)} and, in brackets, by {D_PSGD}, the mean over seeds; "
        f"gaps below {D_PSGD} without attackers on the same graph, the mean over equal seeds",
        partial(by_rules, rules=rules),
    )
    for slug, rules in PAGES.items()
}
"""By the name of a method's page."""
