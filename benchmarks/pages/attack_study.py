"""The section of the study with workers that send wrong models."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.attacks import SCORES, attack_ends, in_words, unharmed, worst_case
from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.image_studies import SETUP, ends_of_all
from benchmarks.pages.study_tables import has_trainings, study_page
from benchmarks.studies.attacks import CASES, CLIPPED, D_PSGD, NUM_WORKERS, PLACES, RULES, SEEDS, SHARE, THIRD, TRIMMED
from benchmarks.tables import table


def said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    found = attack_ends(rows)
    counts = {(rule, graph): unharmed(found, rule, graph) for rule in RULES for graph in PLACES}

    def of(rule: str, graph: str) -> str:
        near, total = counts[rule, graph]
        return f"in {near} of {total}"

    ring, dense = PLACES
    furthest = {rule: worst_case(found, rule, ring) for rule in RULES}
    return " ".join(
        (
            f"**On the {dense} graph the worst honest worker stays within a point of training without attackers "
            f"{of(CLIPPED, dense)} attacks by ClippedGossip, {of(TRIMMED, dense)} by the trimmed mean and "
            f"{of(D_PSGD, dense)} by D-PSGD.**",
            f"On the {ring}: {of(CLIPPED, ring)} by ClippedGossip, {of(TRIMMED, ring)} by the trimmed mean, which has "
            f"nothing to leave out of two neighbours, and {of(D_PSGD, ring)} by D-PSGD.",
            "This is with the consensus distance as the radius of ClippedGossip; with a third of it ClippedGossip "
            f"stays within a point {of(THIRD, dense)} and {of(THIRD, ring)}.",
            f"The worst case of the {ring} with ClippedGossip, {in_words(furthest[CLIPPED])}, takes "
            f"{furthest[CLIPPED]['worst_gap']:.1f} points, the worst one with a third of the radius "
            f"{furthest[THIRD]['worst_gap']:.1f}, and that with D-PSGD {furthest[D_PSGD]['worst_gap']:.1f}: take the "
            "third where half of the neighbours of a worker may attack.",
        )
    )


def summary(rows: pd.DataFrame) -> str:
    """Write the accuracies of all rules by graph, attackers and attack."""
    found = attack_ends(rows)
    shown = found.pivot(index=["graph", "place", "attack"], columns="rule", values=list(SCORES))
    order = dict.fromkeys(found[["graph", "place", "attack"]].itertuples(index=False, name=None))
    lines = [
        {
            "graph": graph,
            "place": place or "0",
            "attack": attack,
            **{
                rule: "{:.1f} / {:.1f}".format(*(shown.loc[(graph, place, attack), (score, rule)] for score in SCORES))
                for rule in RULES
            },
        }
        for graph, place, attack in order
    ]
    heads = {name: (head, "s") for name, head in {"graph": "graph", "place": "attackers", "attack": "attack"}.items()}
    return table(pd.DataFrame(lines), {**heads, **{rule: (f"{rule}, %", "s") for rule in RULES}})


PLANNED = len(SEEDS) * len(CASES)
ATTACK_STUDY: Mapping[str, Page] = study_page(
    "attacks",
    "Accuracy beside workers that send wrong models",
    said,
    has_trainings(*((name, NUM_WORKERS) for name in CASES)),
    planned=PLANNED,
    render=ends_of_all,
    summary=summary,
    setup=SETUP.format(
        task="drawn digits and 2,410 parameters",
        batch=8,
        more=f"""\
{NUM_WORKERS} workers take 300 steps at one rate, which nobody has tuned, and talk to all their neighbours in each
round: two on the ring, five on the exponential graph, which are 1, 2 and 4 ranks away on both sides. A cell has the
accuracy of the averaged model of the honest workers, and of the worst one. "Within a point" is of the worst honest
worker, beside D-PSGD without attackers on the same graph, in the mean over seeds. An attacker keeps a model of its
own by D-PSGD, and sends something else: -5 times its model; its model with normal noise of standard deviation 10 in
each entry; NaN; or, for "A Little Is Enough" (ALIE), the mean of the honest models less z standard deviations in each
entry. By the formula of its paper z is -0.18 for one of eight and 0 for two, so that such an attacker is no harm; z =
1.5 is about its z for 24 of 50. Two attackers are ranks 3 and 7; around a worker they are 3 and 5, so that worker 4
hears nobody else. The consensus distance, of which the radius of ClippedGossip is a third or the whole, is of D-PSGD
without attackers on the graph: after each step of the optimizer, the mean over the training with the first seed. The
share of the trimmed mean is {SHARE}: of five neighbours it leaves out two at each end.""",
    ),
    measures=("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds"),
    question=QUESTIONS[2],
)
"""The section by its name."""
