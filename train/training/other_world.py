"""Going on from a checkpoint of another number of ranks: all begin with the average of what those ranks had."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
        folder: of the checkpoints of this run.
        world: rank and agreement.
        world_size: of this run.

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
    elif config.chosen.period > 1 and "algorithm" in config.chosen.arguments:
        why = "its anchor and the momentum of outer steps belong to the ranks that have made them"
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

    With push-sum the models are averaged as numerators, sum_i w_i z_i / sum_i w_i, which is what gossip would have come
    to. The step is moved to the same place of its epoch.

    Args:
        path: folder of the checkpoint.
        identity, defaults: see `Checkpoints`.
        keys: what a state must have.
        steps_per_epoch: of this run.

    Returns:
        step, model (by the names of the bare module), optimizer, scaler, train_seconds, old_step.

    Raises:
        ValueError: the run was another one, or a file is damaged.
    """
    num_ranks, weights = _world_size(path), 0.0
    model: dict[str, Any] = {}
    states: list[Any] = []
    of_any_world = {name: value for name, value in identity.items() if name not in OF_THE_WORLD}
    for rank in range(num_ranks):
        files = RankFiles(path, rank)
        try:
            manifest = files.read_manifest()
            check_identity(files.state_path, manifest, of_any_world, defaults or {})
            state = files.read_state(manifest, keys)
        except (DamagedError, OSError) as error:
            raise ValueError(f"{error}; resume from another one by its name, or {START_AFRESH}") from error
        weight = _push_sum_weight(state["wrapper"])
        weights += weight
        for name, tensor in state["wrapper"].items():
            if not name.startswith("module."):  # it says whose the state is
                continue
            name = name.removeprefix("module.")
            if not _is_averaged(tensor):
                model.setdefault(name, tensor)
            elif name in model:
                model[name] += weight * _wide(tensor)
            else:
                model[name] = weight * _wide(tensor)
        states.append({name: state[name] for name in ("optimizer", "scaler", "meters", "step")})
    model = {name: x / weights if _is_averaged(x) else x for name, x in model.items()}
    old_step, old_steps = int(states[0]["step"]), int(manifest["steps_per_epoch"])
    return {
        "step": old_step * steps_per_epoch // old_steps,
        "old_step": old_step,
        "num_ranks": num_ranks,
        "model": model,
        "optimizer": _mean([state["optimizer"] for state in states]),
        "scaler": states[0]["scaler"],
        "train_seconds": max(float(state["meters"]["train_seconds"]) for state in states),
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


def _push_sum_weight(state: Any) -> float:
    gossip = getattr(state, "_metadata", {}).get("", {}).get("gossip_state") or {}
    return float(gossip.get("weight", 1.0))


def _mean(values: Sequence[Any]) -> Any:
    """The mean of the tensors and floats of equal trees, and the first of everything else."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_mean(items) for items in zip(*values, strict=True))
    if isinstance(first, Tensor) and _is_averaged(first):
        return torch.stack([_wide(value) for value in values]).mean(0).to(first.dtype)
    return first


def _is_averaged(x: Tensor) -> bool:
    """Whether it is no count or the like."""
    return x.is_floating_point() or x.is_complex()


def _wide(x: Tensor) -> Tensor:
    """In the dtype that means are computed in."""
    return x.to(torch.complex128) if x.is_complex() else x.double()
