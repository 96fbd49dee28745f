r"""Which method and graph to train with, for so many workers on such links: predicted by simulating
all of them at once.

    python -m gossip_modules.simulate --world-size 1024 --rate-gbit 1 --parameters 25e6 \
        --compute-ms 250
    python -m gossip_modules.simulate --world-size 64 \
        --methods osgp dpsgd:torus choco:ring:topk --straggle-share 0.02
    python -m gossip_modules.simulate --world-size 256 --problem consensus --target 1e-6 \
        --methods sgp dpsgd:ring
    python -m gossip_modules.simulate --world-size 16 --rate-gbit 0.1 --parameters 11e6 --tune

Prints a table, the fastest first, and which to choose and why. Steps are those that n small models
really take on a small problem (digits: softmax regression on drawn digits; consensus: vectors that
agree on their mean). Seconds and bytes are predicted for your model, by a model of compute and
links (`ComputeModel`, `LinkModel`). So steps say how much a method's way of averaging costs beside
others, not how long your own training lasts. With --tune each method has the graph, the steps
between rounds and the outer rates that serve it best on this problem; the table names them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..registry import METHODS
from .advice import advise, as_table
from .choice import Choice
from .options import import_named, make_parser, setting_of
from .problems import Consensus, Digits
from .run import simulate
from .setting import Setting
from .tuning import tune


def _choices(texts: Sequence[str], setting: Setting) -> list[Choice]:
    """The methods to compare, each once."""
    choices = [Choice.parse(text) for text in texts]
    resolved = [choice.resolved(setting.world_size, setting.peers_per_itr) for choice in choices]
    if twice := [text for text, choice in zip(texts, resolved) if resolved.count(choice) > 1]:
        raise ValueError(f"got methods {' and '.join(twice)}, which are the same, expected each once; leave one out")
    return choices


def _run(arguments: Sequence[str] | None) -> str:
    """What to print."""
    import_named(arguments)
    options = make_parser(__doc__ or "").parse_args(arguments)
    if options.label_skew and options.problem != "digits":
        raise ValueError(f"got label_skew={options.label_skew} for {options.problem}, expected it for digits only")
    setting = setting_of(options)
    is_digits = options.problem == "digits"
    problem = Digits(label_skew=options.label_skew, seed=options.seed) if is_digits else Consensus(seed=options.seed)
    target = problem.target if options.target is None else options.target
    predict = tune if options.tune else simulate
    predictions, left_out = [], []
    for choice in _choices(options.methods or list(METHODS), setting):
        try:
            predictions.append(predict(choice, setting, problem, target=target, max_steps=options.max_steps))
        except ValueError as error:
            if options.methods:
                raise
            left_out.append(f"Left out: {error}")  # of all methods some do not fit, which nobody asked for by name
    advice = advise(predictions, setting)
    heading = (
        f"{setting.world_size} workers, {setting.num_parameters / 1e6:g} M parameters, {options.compute_ms:g} ms of "
        f"compute, {options.rate_gbit:g} Gbit/s; {problem.error_name} to {target:g}"
    )
    return "\n".join([heading, "", as_table(predictions), "", *advice.sentences, *left_out])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the advice; the exit code, 2 for options that cannot be."""
    try:
        text = _run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
