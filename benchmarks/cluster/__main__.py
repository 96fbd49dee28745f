"""Methods side by side on an emulated cluster: one command builds it, runs the matrix and tears it down.

    sudo .venv/bin/python -m benchmarks.cluster                                      # 8 hosts, 1 Gbit/s, every method
    sudo .venv/bin/python -m benchmarks.cluster --hosts 2 4 8 16 32 --methods ddp sgp osgp
    sudo .venv/bin/python -m benchmarks.cluster --rates 0.1 1 10 --straggle-chance 0.02 --slow-factor 10
    sudo .venv/bin/python -m benchmarks.cluster --rates 0.1 1 --output benchmarks/results/loss_cells.csv --minutes 30

Hosts are network namespaces of this machine, joined by a switch; each link is shaped both ways by a token bucket. Each
rank is a process in its own host. Compute time is waited, layer by layer, and everything else is real: what travels,
what is added, what is allocated. All methods see the same delays, in an order shuffled for each repeat.

--out gets cluster.csv (a row per cell, method, repeat and rank), cluster.md (medians) and pictures. A method that
cannot run is a row that says why. Needs root and iproute2; leaves nothing behind, even when killed.

--output gets the same rows with command, commit, machine and date, appended as they come, and a trial that has a row,
be it of an error, is not repeated: start again to go on. A trial with other --steps is another one. The files in --out
have the rows of all trials that are asked for, also of those that ran before. The exit code is 3 where --minutes were
over before the work.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

from benchmarks.cluster.delays import Delays
from benchmarks.cluster.methods import CLUSTER_METHODS, optimizer_of, require_methods
from benchmarks.cluster.network.links import CONGESTION_CONTROLS, MAX_HOSTS, MIN_HOSTS, EmulatedNetwork, LinkRates
from benchmarks.cluster.network.namespaces import or_exit
from benchmarks.cluster.processes import Fleet, TrialError
from benchmarks.cluster.table import COLUMNS, failed_row, frame, markdown, rows_of, rows_of_trial
from benchmarks.cluster.trials import NUM_WARM_STEPS, Trial
from benchmarks.record import append_rows, rows_in
from visualization.cluster import draw


@dataclass(frozen=True)
class Cluster:
    """What is run: the product of hosts and rates, each with all methods."""

    hosts: tuple[int, ...] = (8,)
    """Hosts, a rank each."""
    rates: tuple[float, ...] = (1.0,)
    """Of each link, both ways, in Gbit/s; 0: not shaped."""
    methods: tuple[str, ...] = tuple(CLUSTER_METHODS)
    """Rows of the table; also texts of algorithms, such as "DiLoCo(sync_every=8)"."""
    compute: float = 150.0
    """Forward and backward of a step, waited, in ms."""
    spread: float = 0.0
    """Sigma of a lognormal factor of the compute time, of each rank and step."""
    straggle_chance: float = 0.0
    """How often a rank is a straggler in a step,"""
    slow_factor: float = 10.0
    """and how much longer it computes then."""
    slow_host: float = 1.0
    """How much longer the last rank computes in every step."""
    slow_link_share: float = 0.0
    """Share of the rate that the last host's link has; 0: as the others."""
    congestion_control: str = CONGESTION_CONTROLS[0]
    """Of TCP on the links: cubic or bbr. For bbr the kernel needs the module tcp_bbr."""
    repeats: int = 3
    """Of each method in each cell."""
    steps: int = 12
    """Timed ones of each trial; rounded up to a method's period."""
    parameters: float = 11.2e6
    """Of the model, float32; ResNet-18 scaled in width."""
    adam: bool = False
    """AdamW, and GossipAdamW in our methods, in place of SGD with momentum."""
    seed: int = 0
    """Of delays and of the order of methods."""
    out: Path = Path("runs/cluster")
    """Folder of everything this writes, but for --output."""
    output: Path | None = None
    """CSV file of results to append to, see above."""
    minutes: float = 0.0
    """No trial begins after so many; 0: all are run."""

    def __post_init__(self) -> None:
        require_methods(self.methods)
        if not self.hosts or not all(MIN_HOSTS <= num <= MAX_HOSTS for num in self.hosts):
            raise ValueError(f"got hosts={self.hosts}, expected {MIN_HOSTS} to {MAX_HOSTS} of them; see --help")
        if not self.rates:
            raise ValueError("got rates=(), expected one at least; see --help")
        if len(set(self.hosts)) < len(self.hosts) or len(set(self.rates)) < len(self.rates):
            raise ValueError(f"got hosts={self.hosts} and rates={self.rates}, expected each once; see --help")
        are_numbers = 0 <= self.compute < math.inf and 1 <= self.parameters < math.inf
        if min(self.repeats, self.steps) < 1 or not are_numbers:
            raise ValueError(f"got {self}, expected repeats, steps and parameters >= 1, and compute >= 0; see --help")
        self.delays(0)
        for rate in self.rates:
            self.links(rate)

    def links(self, rate: float) -> LinkRates:
        """Of the hosts, at a rate in Gbit/s."""
        return LinkRates(rate * 1e9, self.slow_link_share, self.congestion_control)

    def delays(self, repeat: int) -> Delays:
        """Of all methods in a repeat."""
        seed = 1000 * self.seed + repeat
        return Delays(self.spread, self.straggle_chance, self.slow_factor, self.slow_host, seed)

    def trial(self, method: str, number: int, repeat: int, limit_seconds: float) -> Trial:
        """One of the trials."""
        return Trial(
            method=method,
            number=number,
            num_steps=self.steps,
            compute_seconds=self.compute / 1e3,
            delays=self.delays(repeat),
            limit_seconds=limit_seconds,
            num_parameters=self.parameters,
            optimizer=optimizer_of(method, is_adam=self.adam),
        )

    def limit_seconds(self, num_hosts: int, rate: float) -> float:
        """Several times what the slowest method should take for a trial."""
        bits = 32 * self.parameters
        slowest = rate * (self.slow_link_share or 1.0)
        compute = self.compute / 1e3 * max(self.slow_host, 1 + self.straggle_chance * self.slow_factor * num_hosts)
        step = compute * (1 + 3 * self.spread) + (4 * bits / slowest if slowest else 0.0) + num_hosts * bits / 4e9
        return 60 + 3 * step * (self.steps + NUM_WARM_STEPS + 20)

    def main(self) -> int:
        """Run the trials that have no rows yet, print the table of all; the exit code.

        Raises:
            ValueError: --output has other columns.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        start, keys = time.monotonic(), self._keys()
        columns = [name for name in COLUMNS if name != "seed"]  # which is of the provenance
        earlier = frame([]) if self.output is None else rows_in(self.output, columns)[list(COLUMNS)]
        rows = [rows_of_trial(earlier, key) for key in keys]
        for num_hosts, rate in product(self.hosts, self.rates):
            cell = [number for number, key in enumerate(keys) if (key["hosts"], key["rate_gbit"]) == (num_hosts, rate)]
            missing = [number for number in cell if not rows[number]]
            if not missing:
                continue
            print(f"== {num_hosts} hosts, {rate:g} Gbit/s", flush=True)
            links = self.links(rate)
            with EmulatedNetwork(num_hosts, links) as network, closing(Fleet(network, self.out / "logs")) as fleet:
                if network.has_neighbours():
                    print("   another cluster runs on this machine: times are no measure", flush=True)
                for number in missing:
                    if self.minutes and time.monotonic() - start > 60 * self.minutes:
                        return 3
                    rows[number] = self._run(keys[number], number, fleet)
                    self._write_csv(rows)
        text = markdown(self._write_csv(rows))
        (self.out / "cluster.md").write_text(text + "\n")
        print(f"\n{text}\n")
        for picture in draw(self.out / "cluster.csv", self.out):
            print(picture)
        return 0

    def _write_csv(self, rows: Sequence[list[dict[str, Any]]]) -> pd.DataFrame:
        """Write cluster.csv, and give what is in it.

        Args:
            rows: of each trial.
        """
        table = frame(chain.from_iterable(rows))
        table.to_csv(self.out / "cluster.csv", index=False)
        return table

    def _run(self, key: dict[str, Any], number: int, fleet: Fleet) -> list[dict[str, Any]]:
        """The rows of one trial, which are appended to `output` too."""
        bits_per_second = key["rate_gbit"] * 1e9
        limit = self.limit_seconds(key["hosts"], bits_per_second)
        trial = self.trial(key["method"], number, key["repeat"], limit)
        try:
            rows = rows_of(key, fleet.run(trial), rate=bits_per_second)
            print(f"   {key['method']}: {rows[-1]['step_ms']:.0f} ms per step", flush=True)
        except TrialError as error:
            rows = [failed_row(key, str(error))]
            print(f"   {key['method']}: {error}", flush=True)
        if self.output is not None:
            columns = frame(rows).drop(columns="seed")
            append_rows(self.output, columns.to_dict("records"), seed=self.seed)
        return rows

    def _keys(self) -> list[dict[str, Any]]:
        """The columns that say which trial it is, of all trials in their order, cell by cell."""
        order = random.Random(self.seed)
        keys: list[dict[str, Any]] = []
        for num_hosts, rate, repeat in product(self.hosts, self.rates, range(self.repeats)):
            shared = {**self._key(num_hosts, rate), "repeat": repeat}
            for method in order.sample(self.methods, len(self.methods)):
                keys.append({**shared, "method": method, "optimizer": optimizer_of(method, is_adam=self.adam)})
        return keys

    def _key(self, num_hosts: int, rate: float) -> dict[str, Any]:
        delays = asdict(self.delays(0))
        del delays["seed"]
        return {
            "hosts": num_hosts,
            "rate_gbit": rate,
            "num_parameters": self.parameters,
            "planned_ms": self.compute,
            "planned_steps": self.steps,
            **delays,
            "slow_link_share": self.slow_link_share,
            "congestion_control": self.congestion_control,
            "seed": self.seed,
        }


def main() -> int:
    """Run the command line; exit code 2 where this machine or user cannot have a cluster."""
    cluster = tyro.cli(Cluster, description=__doc__)
    with or_exit():
        return cluster.main()


if __name__ == "__main__":
    sys.exit(main())
