"""The doctor's choice for two regions against all of its candidates, measured: on an emulated cluster, as root.

    .venv/bin/python -m benchmarks.two_regions --output benchmarks/results/two_regions.csv   # 2 x 2 hosts, 3 repeats

Two hosts in each of two regions; the regions are joined by a line of 200 Mbit/s each way, which their hosts share, with
20 ms of round trip. The doctor runs on the hosts and predicts methods of one level and of two. Then each of them is
timed on the same hosts, in an order shuffled for each repeat, with compute that is waited (see benchmarks.cluster). The
seconds to the target are the steps of the doctor's small models, times the seconds of a step: predicted, or measured.

Bytes between regions are those of `comm_stats()`, of all ranks, over the steps of a trial, the first ones
included, and those that the line has counted meanwhile in both directions, with all headers and acknowledgements.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.cluster.delays import Delays
from benchmarks.cluster.methods import between_nodes
from benchmarks.cluster.network.line import region_of
from benchmarks.cluster.network.links import DATA, EmulatedNetwork, LinkRates, RegionLine
from benchmarks.cluster.network.namespaces import or_exit
from benchmarks.cluster.processes import Fleet
from benchmarks.cluster.trials import Trial
from benchmarks.record import ROOT, append_rows
from gossip_modules.lab.levels import SAME
from gossip_modules.methods import read_algorithm
from gossip_modules.regions import Regions

_PORT = 29_400
_DOCTOR_SECONDS = 300.0


@dataclass(frozen=True)
class TwoRegions:
    """The cluster, and what is measured on it."""

    hosts: int = 4
    """In two regions, a rank each."""
    inside: float = 1.0
    """Rate of a host's link, in Gbit/s."""
    between: float = 0.2
    """Rate of the line between the regions, each way, in Gbit/s."""
    round_trip: float = 20.0
    """That the line adds, in ms."""
    compute: float = 150.0
    """Forward and backward of a step, waited, in ms."""
    parameters: float = 2.8e6
    """Of the model, float32."""
    methods: tuple[str, ...] = ("ar", "sgp", "osgp", "LocalSGD(sync_every=10)", "LocalSGD(sync_every=30)")
    """Of one level; those of two are the doctor's own."""
    repeats: int = 3
    """Of each method."""
    steps: int = 12
    """Timed ones of a trial; rounded up to a method's period."""
    limit: int = 0
    """Only so many methods, the fastest predicted ones; 0: all."""
    seed: int = 0
    """Of the order of trials."""
    out: Path = Path("runs/two_regions")
    """Folder of logs and of the doctor's text."""
    output: Path | None = None
    """CSV file to append to."""

    def __post_init__(self) -> None:
        if self.hosts < 4 or self.hosts % 2:
            raise ValueError(f"got --hosts {self.hosts}, expected an even number of at least 4: regions of equal sizes")

    def main(self) -> None:
        """Ask the doctor, then measure; prints a line for each trial."""
        self.out.mkdir(parents=True, exist_ok=True)
        line = RegionLine(1e9 * self.between, self.round_trip / 1e3)
        links = LinkRates(1e9 * self.inside, num_regions=2, line=line)
        with EmulatedNetwork(self.hosts, links) as network:
            if network.has_neighbours():
                print("another cluster runs on this machine: times are no measure", flush=True)
            said = self.ask_doctor(network)
            levels = sorted((x for x in said["levels"] if x["agrees"]), key=lambda x: x["seconds_to_target"] or 1e9)
            levels = levels[: self.limit or None]
            draw, number = random.Random(self.seed), 0
            with closing(Fleet(network, self.out / "logs")) as fleet:
                for repeat in range(self.repeats):
                    for level in draw.sample(levels, len(levels)):
                        number += 1
                        row = {**self._measured(network, fleet, level, number), "repeat": repeat}
                        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
                        if self.output is not None:
                            append_rows(self.output, [{**self._setting(said), **row}], seed=self.seed)

    @property
    def regions(self) -> Regions:
        """As they are; the doctor finds them."""
        places = [region_of(rank, self.hosts, 2) for rank in range(self.hosts)]
        return Regions.of([[rank for rank, place in enumerate(places) if place == k] for k in range(2)])

    def ask_doctor(self, network: EmulatedNetwork) -> dict[str, Any]:
        """What the doctor says on the hosts, as its JSON."""
        options = ["--parameters", str(self.parameters), "--compute", str(self.compute / 1e3), "--json"]
        command = [sys.executable, "-m", "gossip_modules.doctor", *options, "--seconds", "60", "--methods"]
        world = {"MASTER_ADDR": network.control_address(0), "MASTER_PORT": str(_PORT), "WORLD_SIZE": str(self.hosts)}
        shared = {**os.environ, **world, "GLOO_SOCKET_IFNAME": DATA, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, *command, *self.methods],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=(self.out / f"doctor{rank}.log").open("wb"),
                cwd=ROOT,
            )
            for rank, host in enumerate(network.hosts)
        ]
        outputs = [process.communicate(timeout=_DOCTOR_SECONDS)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError(f"the doctor has failed, see {self.out}/doctor0.log")
        (self.out / "doctor.json").write_bytes(outputs[0])
        return dict(json.loads(outputs[0]))

    def _measured(self, network: EmulatedNetwork, fleet: Fleet, level: dict[str, Any], number: int) -> dict[str, Any]:
        text = level["between"]
        name = read_algorithm(text).method.name
        name = name if name in ("ar", "sgp", "osgp") else text
        trial = Trial(
            method=name if level["inside"] == SAME else between_nodes(name, self.hosts // 2),
            number=number,
            num_steps=self.steps,
            compute_seconds=self.compute / 1e3,
            delays=Delays(),
            limit_seconds=600.0,
            num_parameters=self.parameters,
            switch=network.switch,
            regions=str(self.regions),
        )
        answers = fleet.run(trial)
        counted, on_line = sum(answer["counted_bytes"] for answer in answers), answers[0]["line_bytes"]
        step = max(answer["mean_step_ms"] for answer in answers)
        return {
            "inside_region": level["inside"],
            "method": text,
            "is_chosen": level["is_chosen"],
            "predicted_ms": round(1e3 * level["step_s"], 1),
            "step_ms": round(step, 1),
            "ratio": round(1e3 * level["step_s"] / step, 3),
            "steps_to_target": level["steps"],
            "predicted_s": round(level["seconds_to_target"], 2) if level["seconds_to_target"] else None,
            "seconds": round(level["steps"] * step / 1e3, 2),
            "counted_bytes": int(counted),
            "line_bytes": on_line,
            "headers": round(on_line / counted - 1, 4) if counted else None,
        }

    def _setting(self, said: dict[str, Any]) -> dict[str, Any]:
        border = said["borders"][0]
        return {
            "hosts": self.hosts,
            "inside_gbit": self.inside,
            "between_gbit": self.between,
            "line_round_trip_ms": self.round_trip,
            "compute_ms": self.compute,
            "num_parameters": self.parameters,
            "found_regions": str(Regions.of(said["regions"])),
            "round_trip_ms": round(1e3 * said["round_trip_between_s"], 2),
            "alone_gbit": round(border["alone"] / 1e9, 4),
            "together_gbit": round(border["together"] / 1e9, 4),
            "load": round(os.getloadavg()[1], 1),
        }


def main() -> None:
    """Run the command line; exit code 2 where this machine or user cannot have a cluster."""
    study = tyro.cli(TwoRegions, description=__doc__)
    with or_exit():
        study.main()


if __name__ == "__main__":
    main()
