"""The costs of a run over a mailbox: how often workers can share their models, and for how much money."""

from __future__ import annotations

import numpy as np

from ..mailbox.costs import PRICES, PRICES_AS_OF, RoundCosts, least_sync_every, prices_of
from .clock import check, check_share
from .plan import Setting

SYNC_EVERY_TO_SHOW = (10, 30, 100, 300, 1000)
_SCHEMES = (*PRICES, "file", "store", "memory")
_BYTES_PER_NUMBER = 4
_VECTORS_OF_A_SAVED_MODEL = 3  # the model, the anchor and the momentum of an outer method
_COLUMNS = ("steps between rounds", "s per round", "waiting", "$/h requests", "$/h storage", "$/h egress")


def mailbox_costs(setting: Setting, store: str, *, max_waiting: float = 0.05, sync_every: int | None = None) -> str:
    """The seconds, requests and dollars of rounds of a method with exact averages, such as DiLoCo, over a mailbox.

    The law of the requests is [Note: The requests of a round] of `RoundCosts`. All workers come at the same time, so a
    wait is the time of the messages of a round one after another. A delay of the method hides this time.

    Args:
        setting: the workers, the model, the duration of steps, and the link of a worker to the store.
        store: the address of the run, or its scheme, such as "s3".
        max_waiting: the largest share of waiting in the time of a worker.
        sync_every: steps between two rounds, shown beside others.

    Returns:
        A table, and the smallest number of steps between two rounds with so little waiting.

    Raises:
        ValueError: an unknown scheme, or a number is out of range.
    """
    scheme, n = store.partition("://")[0], setting.world_size
    check("mailbox", store, scheme in _SCHEMES, f"an address, or one of {', '.join(_SCHEMES)}")
    check_share("max_waiting", max_waiting)
    check("max_waiting", max_waiting, max_waiting > 0, "a share above 0, as a round takes time")
    check("sync_every", sync_every, sync_every is None or sync_every >= 2, "at least 2 steps")
    size = _BYTES_PER_NUMBER * (setting.num_parameters or 1)
    workers = np.arange(n)
    step, links = float(setting.compute.median_seconds(workers).max()), setting.network.on(workers)
    byte_s = size / (links.wire_seconds(size) * float(links.slowness.max()))
    costs, prices = RoundCosts(n, size, _VECTORS_OF_A_SAVED_MODEL * size), prices_of(f"{scheme}://")
    wait = costs.seconds(byte_s, latency=links.latency_s)
    least = least_sync_every(step, wait, waiting_share=max_waiting)
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for every in sorted({*SYNC_EVERY_TO_SHOW, least, sync_every or least}):
        seconds = every * step + wait
        money = prices.hourly(costs.requests, seconds=seconds, stored_bytes=costs.stored_bytes)
        dollars = (f"{x:.3g}" for x in (money.requests, money.storage, money.egress))
        rows.append((str(every), f"{seconds:.1f}", f"{wait / seconds:.0%}", *dollars))
    widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    writes, reads, lists, up, down = (x / n for x in costs.requests)
    return "\n".join(
        [
            f"{n} workers over {scheme}, messages of {size / 1e6:g} MB, {step:g} s a step; {PRICES_AS_OF}",
            "",
            *table,
            "",
            f"A round takes {wait:.3g} s: {n + 2} messages one after another at {byte_s / 1e6:.4g} MB/s.",
            f"A worker has at least {writes:.3g} writes, {reads:.3g} reads and {lists:.3g} lists in a round, "
            f"{up / 1e6:.4g} MB up with its share of saved models, and {down / 1e6:.4g} MB down.",
            f"At most {max_waiting:.0%} waiting needs {least} steps between two rounds, or a delay of the method.",
            "Egress is for workers outside the region of the store; inside it is free. A tracked optimizer makes saved "
            "models larger.",
        ]
    )
