"""Show the workers, rounds, saved models and costs of a run over a mailbox, or delete it.

    python -m gossip_modules.mailbox s3://bucket/run
    python -m gossip_modules.mailbox file:///shared/run --json
    python -m gossip_modules.mailbox s3://bucket/run --price egress=0 storage=0.02
    python -m gossip_modules.mailbox s3://bucket/run --clean --before 1000
    python -m gossip_modules.mailbox s3://bucket/run --clean --yes

Set GOSSIP_JOB_KEY as for the workers. The command looks twice, since a live worker writes a sign of life now and then.
Requests and costs are the least that the rounds in the store have needed, at list prices of US regions. Egress is the
price of reads by workers outside the region of the store; inside it is free. Nothing is written, but with --clean.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from .costs import PRICES_AS_OF, Prices, prices_of
from .errors import MailboxError
from .follower import open_run
from .medium import Medium
from .report import RunReport, report_of
from .saved_models import KEPT_ROUNDS

_NUMBERED = re.compile(r"(?:round/[^/]+|model)/(\d{10})(?:/|$)")
_PRICES = tuple(vars(Prices()))


def price(text: str) -> tuple[str, float]:
    """Return a price, which is written as egress=0.09."""
    name, _, value = text.partition("=")
    try:
        if name in _PRICES and 0 <= float(value) < math.inf:
            return name, float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"got {text!r}, expected such as egress=0.09, with one of {', '.join(_PRICES)}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all options."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m gossip_modules.mailbox", description=__doc__, formatter_class=shape
    )
    add = parser.add_argument
    add("run", help="the address of the run, as its workers have it")
    add("--json", action="store_true", help="one JSON object in place of the text")
    add("--wait", type=float, help="the most seconds between the two looks (default: 1.5 periods of signs of life)")
    add("--timeout", type=float, default=60.0, help="of requests to the store, in seconds (default 60)")
    help_ = f"own prices in dollars, of {', '.join(_PRICES)}: a GB and month, a million requests, a GB"
    add("--price", type=price, nargs="+", default=[], metavar="NAME=DOLLARS", help=help_)
    add("--clean", action="store_true", help="delete the run")
    add("--before", type=int, metavar="N", help="with --clean: only rounds and models before round N")
    add("--yes", action="store_true", help="with --clean: without it nothing is deleted")
    return parser


def as_text(report: RunReport, prices: Prices) -> str:
    """The report for people."""
    counts = {state: sum(w.state == state for w in report.workers) for state in ("live", "silent", "left")}
    lines = [f"{report.address}: {', '.join(f'{count} {state}' for state, count in counts.items())}", ""]
    lines += [f"{'worker':>6}  {'state':<6} {'last round':>10} {'steps':>8}"]
    for w in report.workers:
        lines.append(f"{w.number:>6}  {w.state:<6} {_or_dash(w.last_round):>10} {_or_dash(w.step):>8}")
    lines += ["", f"{'stream':<12} {'newest':>8} {'seconds':>8} {'MB':>8}  {'counted':<16} late"]
    for s in report.streams:
        names = [",".join(map(str, numbers)) or "-" for numbers in (s.counted, s.late)]
        size = s.costs.message_bytes / 1e6
        lines.append(f"{s.name:<12} {s.newest:>8} {s.seconds:>8.3g} {size:>8.3g}  {names[0]:<16} {names[1]}")
    models = f"{len(report.models)}, the newest after round {report.models[-1]}" if report.models else "none"
    lines += [
        "",
        f"saved models: {models}",
        f"stored: {report.num_objects} objects, {report.stored_bytes / 1e9:.3g} GB",
    ]
    for s in report.streams:
        writes, reads, lists, up, down = (x / s.costs.num_workers for x in s.costs.requests)
        lines.append(
            f"per worker and round of {s.name}, at least: {writes:.3g} writes, {reads:.3g} reads, {lists:.3g} lists, "
            f"{up / 1e6:.3g} MB up, {down / 1e6:.3g} MB down"
        )
    money = report.money(prices)
    lines.append(
        f"dollars per hour, at least ({PRICES_AS_OF}): storage {money.storage:.3g}, requests {money.requests:.3g}; "
        f"egress {money.egress:.3g} if all workers are outside the region of the store"
    )
    if math.isnan(sum(money)):
        lines.append(
            "nan: the prices of this store or the duration of its rounds are unknown; --price gives the former"
        )
    if report.num_refused:
        lines.append(f"{report.num_refused} objects did not open: they are damaged, or sealed with another key")
    return "\n".join(lines)


def as_json(report: RunReport, prices: Prices) -> str:
    """The report as one JSON object; NaN is null."""
    streams = [{**asdict(s), "requests": s.costs.requests._asdict()} for s in report.streams]
    whole = {**asdict(report), "streams": streams, "dollars_per_hour": report.money(prices)._asdict()}
    return json.dumps(_finite(whole))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _to_delete(report: RunReport, medium: Medium, before: int | None) -> list[str]:
    """The paths to delete: all, or the rounds and models before a number.

    Raises:
        ValueError: the number is too large: workers that are late, or that come, need these rounds.
    """
    paths = sorted(medium.list())
    if before is None:
        return paths
    has_ended = all(worker.state == "left" for worker in report.workers)
    limit = max(report.models, default=0) - (0 if has_ended else KEPT_ROUNDS)
    if not 0 <= before <= limit:
        raise ValueError(
            f"got --before {before}, expected 0 to {max(limit, 0)}: the newest saved model, and the last {KEPT_ROUNDS} "
            "rounds before it while workers have not left, stay for workers that come or are late"
        )
    numbered = [(found[1], path) for path in paths if (found := _NUMBERED.match(path))]
    return [path for number, path in numbered if int(number) < before]


def _clean(report: RunReport, medium: Medium, options: argparse.Namespace) -> str:
    paths = _to_delete(report, medium, options.before)
    live = [str(worker.number) for worker in report.workers if worker.state == "live"]
    if not options.yes:
        whose = f", whose workers {', '.join(live)} live" if live else ""
        raise ValueError(
            f"got --clean without --yes, expected it to delete {len(paths)} objects of {report.address}{whose}"
        )
    medium.delete(paths)
    return f"deleted {len(paths)} objects of {report.address}"


def _run(arguments: Sequence[str] | None) -> str:
    options = make_parser().parse_args(arguments)
    if options.before is not None and not options.clean:
        raise ValueError("got --before without --clean, expected both")
    if not 0 < options.timeout < math.inf or not 0 <= (options.wait or 0.0) < math.inf:
        raise ValueError(f"got --timeout {options.timeout:g} and --wait {options.wait}, expected seconds")
    prices = replace(prices_of(options.run), **dict(options.price))
    medium = open_run(options.run, timeout=options.timeout)
    report = report_of(medium, wait=options.wait, show=lambda text: print(text, file=sys.stderr))
    if options.clean:
        return _clean(report, medium, options)
    return (as_json if options.json else as_text)(report, prices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code: 2 for bad options, 1 if the store refuses or there is no run."""
    try:
        print(_run(arguments))
    except (ValueError, ImportError, MailboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, MailboxError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
