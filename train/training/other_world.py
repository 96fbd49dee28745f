"""Going on from a checkpoint of another number of ranks: all begin with the average of what those ranks had."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from gossip_modules.checkpoints import average_checkpoints
from gossip_modules.methods import METHODS
from train.job.files import paths_in
from train.job.world import Agreement
from train.run_config import RunConfig
from train.training.checkpoint import START_AFRESH, SUPERSEDED, check_identity
from train.training.rank_files import DamagedError, RankFiles, step_of

OF_THE_WORLD = ("world_size", "steps_per_epoch", "text")
"""What a manifest says that follows from the number of ranks; `text` has the hashes of their shares."""


def find_other_world(resume: str, folder: Path, world: Agreement, world_size: int) -> Path | None:
    """Collective: the checkpoint to go on from, if it is of another number of ranks; None: it is of as many, or none.

    Args:
        resume: see RunConfig.
        folder: the folder of the checkpoints of this run.
        world: rank and agreement.
        world_size: the world size of this run.

    Raises:
        ValueError: the ranks do not see the same files.
    """

    def find() -> list[Any]:
        named = Path(resume)
        if step_of(named) is not None:
            candidates = [named]
        else:
            candidates = paths_in(folder if resume == "auto" else named / folder.name, "step_*")[::-1]
        for path in candidates:
            size = _world_size(path)
            if size and all(RankFiles(path, rank).manifest_path.is_file() for rank in range(size)):
                return [str(path), size]
        return ["", 0]

    if not resume:
        return None
    found = world.on_every_rank(find)
    path, _ = found[0]
    if not any(other_size not in (0, world_size) for _, other_size in found):
        return None
    if any(other != found[0] for other in found):
        raise ValueError(
            f"got checkpoints of another number of ranks ({max(size for _, size in found)}) that only some ranks see, "
            f"expected one folder for all: each reads the files of all; copy them, or {START_AFRESH}"
        )
    return Path(path)


def check_other_world(config: RunConfig, path: Path, world_size: int) -> None:
    """Raise ValueError where the method's state cannot come from another number of ranks."""
    method, size = METHODS[config.recipe], _world_size(path)
    why = ""
    if method.pace != "lockstep":
        why = "its ranks take steps of their own, which belong to them"
    elif ":" in config.peers_per_itr:
        why = f"--peers-per-itr {config.peers_per_itr} counts rounds from the start of the run"
    if why:
        raise ValueError(
            f"got {path} of {size} ranks with --recipe {config.recipe}, expected one of {world_size}, since {why}; "
            f"resume with {size} ranks, or {START_AFRESH}"
        )


def load_other_world(
    path: Path,
    identity: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    keys: Collection[str],
    steps_per_epoch: int,
) -> dict[str, Any]:
    """The state that any rank begins with: the average of the models and of the optimizers of all that have saved.

    See `average_checkpoints`. The step is moved to the same place of its epoch.

    Args:
        path: folder of the checkpoint.
        identity, defaults: see `Checkpoints`.
        keys: what a state must have.
        steps_per_epoch: the steps per epoch of this run.

    Returns:
        step, model (by the names of the bare module), optimizer, scaler, train_seconds, old_step.

    Raises:
        ValueError: the run was another one, or a file is damaged.
    """
    num_ranks = _world_size(path)
    of_any_world = {name: value for name, value in identity.items() if name not in OF_THE_WORLD}
    manifests: list[Mapping[str, Any]] = []
    seconds: list[float] = []

    def states() -> Iterator[dict[str, Any]]:
        for rank in range(num_ranks):
            files = RankFiles(path, rank)
            try:
                manifests.append(files.read_manifest())
                check_identity(files.state_path, manifests[-1], of_any_world, defaults or {})
                state = files.read_state(manifests[-1], keys)
            except (DamagedError, OSError) as error:
                raise ValueError(f"{error}; resume from another one by its name, or {START_AFRESH}") from error
            seconds.append(float(state["meters"]["train_seconds"]))
            yield {name: state[name] for name in ("wrapper", "optimizer", "scaler", "step")}

    average = average_checkpoints(states(), model="wrapper")
    old_step, old_steps = int(average["step"]), int(manifests[-1]["steps_per_epoch"])
    return {
        "step": old_step * steps_per_epoch // old_steps,
        "old_step": old_step,
        "num_ranks": num_ranks,
        "model": average["wrapper"],
        "optimizer": average["optimizer"],
        "scaler": average["scaler"],
        "train_seconds": max(seconds),
    }


def set_aside_other_worlds(folder: Path, world_size: int) -> None:
    """Move the checkpoints of other numbers of ranks to superseded/; called by one rank."""
    for path in paths_in(folder, "step_*"):
        if _world_size(path) not in (0, world_size):
            (folder / SUPERSEDED).mkdir(exist_ok=True)
            target = folder / SUPERSEDED / path.name
            number = 1
            while target.exists():
                target = folder / SUPERSEDED / f"{path.name}.{number}"
                number += 1
            path.rename(target)


def _world_size(path: Path) -> int:
    """Of the run that has saved a checkpoint; 0: there is none, or it does not say."""
    try:
        return int(json.loads(RankFiles(path, 0).manifest_path.read_text()).get("world_size", 0))
    except (OSError, ValueError, AttributeError, TypeError):
        return 0
