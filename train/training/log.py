"""RunLog: one CSV per rank, one row per epoch; statistics every few steps for `gossip_modules.watch`; TensorBoard, a
progress bar and printed lines on rank 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from tqdm import tqdm

from gossip_modules.metrics import JSONLines
from train.job.files import write_atomically
from train.job.listener import NOBODY, RunListener
from train.job.outputs import TENSORBOARD, csv_path
from train.training.evaluate import Validation, in_words
from train.training.meters import Meters

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class EpochRow:
    """A row of the CSV: what one rank knows after an epoch. Columns of a validation are empty where none was made."""

    epoch: int
    """Epochs done."""
    step: int
    """Optimizer steps per rank that the run has done; the same on every rank."""
    own_steps: int
    """Optimizer steps that this rank has done: in lockstep the same."""
    time_seconds: float
    """Spent in training since the start of the run, resumptions included, validation and checkpoints not."""
    data_seconds: float
    """Of this epoch, waiting for the loader."""
    wait_seconds: float
    """Waiting for peers since this process started."""
    learning_rate: float
    loss: float | None
    """Mean over the training items of this rank in this epoch; empty if the others have taken all its steps."""
    train_accuracy_percent: float | None
    consensus_distance: float | None
    """sqrt(mean_i ||x_i - mean_j x_j||^2)."""
    bytes_sent: float
    """By this rank since the start of the run."""
    num_rounds: float
    """Gossip rounds since this process started."""
    mean_staleness_forwards: float
    max_staleness_forwards: float
    own_test: Mapping[str, float]
    """Metrics of the model of this rank, columns own_test_<metric>; empty where there was no validation."""
    averaged_test: Mapping[str, float]
    """Of the average of all models, columns averaged_test_<metric>."""

    @classmethod
    def of(
        cls,
        epoch: int,
        step: int,
        own_steps: int,
        learning_rate: float,
        meters: Meters,
        stats: Mapping[str, float],
        validation: Validation | None,
    ) -> EpochRow:
        """Out of the meters, the wrapper's `comm_stats()`, and the validation if one was made."""
        return cls(
            epoch=epoch,
            step=step,
            own_steps=own_steps,
            time_seconds=meters.train_seconds,
            data_seconds=meters.data_seconds,
            wait_seconds=stats["wait_seconds"],
            learning_rate=learning_rate,
            loss=meters.loss if meters.has_items else None,
            train_accuracy_percent=meters.accuracy_percent if meters.has_items else None,
            consensus_distance=validation.consensus_distance if validation else None,
            bytes_sent=meters.bytes_sent_before + stats["bytes_sent"],
            num_rounds=stats["num_rounds"],
            mean_staleness_forwards=stats["mean_staleness"],
            max_staleness_forwards=stats["max_staleness"],
            own_test=validation.own if validation else {},
            averaged_test=validation.averaged if validation else {},
        )

    @property
    def columns(self) -> dict[str, float | None]:
        """The row by the names of its columns."""
        values = asdict(self)
        for model in ("own_test", "averaged_test"):
            values |= {f"{model}_{metric}": value for metric, value in values.pop(model).items()}
        return values


class RunLog:
    """Where a run writes what it measures.

    Args:
        folder: the folder of the run.
        rank: this rank; rank 0 also writes TensorBoard and prints, unless `lead` says otherwise.
        step: steps per rank already done; rows of later ones, left by a run that was stopped, are dropped.
        listener: hears what is measured.
    """

    def __init__(self, folder: Path, *, rank: int, step: int = 0, listener: RunListener = NOBODY) -> None:
        self._path = csv_path(folder, rank)
        self._rank, self._listener, self._choices = rank, listener, ""
        self._rows: list[dict[Any, Any]] = []
        if step and self._path.is_file():
            rows = pd.read_csv(self._path)
            self._rows = rows[rows["step"] <= step].to_dict("records")
        self._folder, self._metrics = folder, JSONLines(folder)
        self._board: SummaryWriter | None = None
        self.lead(rank == 0, step=step)

    def lead(self, is_first: bool, *, step: int) -> None:
        """Write TensorBoard and print from now on, which one rank does, or leave that to another one.

        Args:
            is_first: whether it is this one.
            step: steps per rank already done; points of later ones are dropped.
        """
        self._is_printing = is_first
        if not is_first:
            self.close()
        elif self._board is None:
            # Imported here: only one rank pays the second it takes.
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(self._folder / TENSORBOARD, purge_step=step)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the CSV so far, those of an earlier process included."""
        return [dict(row) for row in self._rows]

    def progress(self, epoch: int, *, first_step: int, num_steps: int) -> tqdm[int]:
        """A bar of the steps of an epoch that are left, to be updated by hand; shown on rank 0 of a terminal."""
        return tqdm(
            desc=f"epoch {epoch}",
            initial=first_step,
            total=num_steps,
            unit="step",
            leave=False,
            disable=None if self._is_printing else True,  # None: shown only on a terminal
        )

    def point(self, step: int, stats: Mapping[str, float], **values: float) -> None:
        """Values within an epoch, for TensorBoard and the listener; with `comm_stats()` for `gossip_modules.watch`."""
        self._metrics({"time": time.time(), "rank": str(self._rank), "step": step, **values, **stats})
        self._listener.metric("train", {"step": step, **values}, rank=self._rank)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"train/{name}", value, step)

    def epoch(self, row: EpochRow) -> None:
        """Add `row` to the CSV and tell the listener; on rank 0 to TensorBoard and to the terminal too."""
        values = row.columns
        self._rows.append(values)
        self._listener.metric("epoch", values, rank=self._rank)
        write_atomically(self._path, lambda temporary: pd.DataFrame(self._rows).to_csv(temporary, index=False))
        if self._board is not None:
            for name, value in values.items():
                if value is not None and name not in ("epoch", "step"):
                    self._board.add_scalar(f"epoch/{name}", value, row.step)
        self.print(_line(row))

    def hyper_parameters(self, options: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """The options of the run with its results, for the HPARAMS tab of TensorBoard; called once, at its end."""
        if self._board is not None:
            from torch.utils.tensorboard.summary import hparams

            kinds = (bool, int, float)
            shown = {name: value if isinstance(value, kinds) else str(value) for name, value in options.items()}
            metrics = {f"result/{name}": value for name, value in results.items()}
            # Not add_hparams, which writes a second file: where its name comes first, its figures are dropped.
            for summary in hparams(shown, metrics):
                self._board._get_file_writer().add_summary(summary)
            for name, value in metrics.items():
                self._board.add_scalar(name, value)

    def choices(self, stats: Mapping[str, float]) -> None:
        """Print what ranks have measured and chosen (--overlap auto, --delay auto), where it is new."""
        chosen = {name.removeprefix("auto_"): x for name, x in stats.items() if name.startswith("auto_")}
        text = ", ".join(f"{name} = {x:.4g}" for name, x in chosen.items())
        if text and text != self._choices:
            self.print(f"chosen by all ranks: {text}")
        self._choices = text

    def print(self, text: str) -> None:
        """Print on rank 0, above the progress bar."""
        if self._is_printing:
            tqdm.write(text)

    def close(self) -> None:
        """Write out and close; idempotent."""
        self._metrics.close()
        if self._board is not None:
            self._board.close()
            self._board = None


def _line(row: EpochRow) -> str:
    line = f"epoch {row.epoch:3d}  {row.time_seconds:7.1f} s  "
    if row.loss is None or row.train_accuracy_percent is None:
        line += "no steps of this rank"
    else:
        line += f"loss {row.loss:.4f}  train {row.train_accuracy_percent:6.2f} %"
    if row.own_test:
        line += f"  test: own {in_words(row.own_test)}"
    if row.averaged_test:
        line += f"  averaged {in_words(row.averaged_test)}  consensus distance {row.consensus_distance:.3g}"
    return line
