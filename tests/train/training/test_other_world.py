"""Going on from a checkpoint of another number of ranks: the average of what they had, or a refusal."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.processes import run_processes
from tests.harness.training import gloo_world, train
from tests.train.training.test_checkpoint import Ranks
from train.tasks.images.config import Config
from train.training.checkpoint import Checkpoints
from train.training.other_world import (
    check_other_world,
    find_other_world,
    load_other_world,
    set_aside_other_worlds,
)

IDENTITY = {"recipe": "sgp", "model_fingerprint": "abc"}
KEYS = ("step", "wrapper", "optimizer", "scaler", "meters")


def state_of(rank: int, *, weight: float) -> dict[str, Any]:
    """What a rank saves: its estimate, its push-sum weight, and an optimizer that has taken two steps."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
    wrapper = nn.ModuleDict({"module": model}).state_dict()
    wrapper._metadata[""]["gossip_state"] = {"weight": torch.tensor([weight])}  # type: ignore[attr-defined]
    meters = {"train_seconds": 10.0 + rank}
    return {"step": 30, "wrapper": wrapper, "optimizer": optimizer.state_dict(), "scaler": {}, "meters": meters}


def save(folder: Path, weights: list[float], *, steps_per_epoch: int = 12) -> Path:
    identity = {**IDENTITY, "world_size": len(weights), "steps_per_epoch": steps_per_epoch}

    def on_rank(member: Any) -> Path:
        return Checkpoints(folder, member, identity).save(30, state_of(member.rank, weight=weights[member.rank]))

    (path, *_) = Ranks(len(weights)).run(on_rank)
    assert isinstance(path, Path), path
    return path


@pytest.mark.parametrize("new_size", [1, 3, 8])
def test_all_begin_with_the_average_of_the_numerators_at_the_same_place_of_the_epoch(
    tmp_path: Path, new_size: int
) -> None:
    folder = tmp_path / "checkpoints"
    path = save(folder, [0.5, 1.0, 2.0, 0.5])
    found = Ranks(new_size).run(lambda member: find_other_world("auto", folder, member, new_size))
    assert found == [path] * new_size
    assert Ranks(1).run(lambda member: find_other_world(str(tmp_path), folder / "none", member, 4)) == [None]
    identity = {**IDENTITY, "world_size": new_size, "steps_per_epoch": 16}
    state = load_other_world(path, identity, keys=KEYS, steps_per_epoch=16)
    mean = (0 * 0.5 + 1 * 1.0 + 2 * 2.0 + 3 * 0.5) / 4
    assert {name: x.unique().tolist() for name, x in state["model"].items()} == {"weight": [mean], "bias": [mean]}
    # Two steps with the gradient rank + 1 leave a velocity of 1.9 times it; on the average 2.5.
    momentum = state["optimizer"]["state"][0]["momentum_buffer"]
    assert torch.allclose(momentum, torch.full((1, 2), 1.9 * 2.5))
    assert (state["step"], state["old_step"], state["num_ranks"]) == (40, 30, 4)
    assert state["train_seconds"] == 13.0
    set_aside_other_worlds(folder, new_size)
    assert [entry.name for entry in folder.iterdir()] == ["superseded"]


def test_complex_parameters_and_their_momentum_are_averaged_too(tmp_path: Path) -> None:
    identity = {**IDENTITY, "world_size": 2, "steps_per_epoch": 12}

    def on_rank(member: Any) -> Path:
        state = state_of(member.rank, weight=1.0 + 2 * member.rank)
        z = torch.tensor([1 + 2j, 3 - 1j]) * (member.rank + 1)
        state["wrapper"]["module.z"] = z
        state["optimizer"]["state"][0]["momentum_buffer"] = z.clone()
        return Checkpoints(tmp_path, member, identity).save(30, state)

    (path, *_) = Ranks(2).run(on_rank)
    assert isinstance(path, Path), path
    state = load_other_world(path, {**identity, "world_size": 3}, keys=KEYS, steps_per_epoch=12)
    first = torch.tensor([1 + 2j, 3 - 1j])
    torch.testing.assert_close(state["model"]["z"], (first * (1 * 1 + 2 * 3) / 4).to(torch.complex128))
    torch.testing.assert_close(state["optimizer"]["state"][0]["momentum_buffer"], 1.5 * first)


def test_a_run_of_other_options_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, [1.0, 1.0])
    with pytest.raises(ValueError, match=r"of a run with recipe='sgp', expected 'dpsgd' as in this run; resume with"):
        load_other_world(path, {**IDENTITY, "recipe": "dpsgd"}, keys=KEYS, steps_per_epoch=4)
    (path / "rank_0001.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"rank_0001.pt of 0 bytes, .* truncated; resume from another one by its name"):
        load_other_world(path, IDENTITY, keys=KEYS, steps_per_epoch=4)


def test_ranks_that_do_not_see_the_same_files_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", [1.0, 1.0])

    def find(member: Any) -> Path | None:
        folder = tmp_path / ("checkpoints" if member.rank == 0 else "elsewhere")
        return find_other_world("auto", folder, member, 3)

    for error in Ranks(3).run(find):
        assert "got checkpoints of another number of ranks (2) that only some ranks see" in str(error)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"recipe": "adpsgd"}, "since its ranks take steps of their own"),
        ({"peers_per_itr": "0:2,3:1"}, "since --peers-per-itr 0:2,3:1 counts rounds from the start"),
    ],
)
def test_methods_whose_state_belongs_to_the_ranks_are_refused(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    path = save(tmp_path, [1.0, 1.0])
    with pytest.raises(ValueError, match=rf"of 2 ranks .* expected one of 3, {why}.*; resume with 2 ranks, or start"):
        check_other_world(Config(**options), path, 3)


def _train(rank: int, options: dict[str, Any]) -> str:
    """What the rank has printed: capfd sees processes of the server's first test alone."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(Config(**options), gloo_world())
    return printed.getvalue()


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("recipe", "sizes"), [("sgp", (4, 3)), ("choco", (4, 8)), ("diloco", (4, 2)), ("ar", (2, 3)), ("osgp", (4, 1))]
)
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, recipe: str, sizes: tuple[int, int]) -> None:
    options = {"recipe": recipe, "out_dir": str(tmp_path / "run"), "checkpoint_every": 2, "batch_size": 16}
    options["milestones"] = ()
    first = run_processes(sizes[0], _train, {**options, "epochs": 6}, timeout=300)[0].result
    second = run_processes(sizes[1], _train, {**options, "epochs": 8, "resume": "auto"}, timeout=300)[0].result
    assert f"by {sizes[0]} ranks, with {sizes[1]}: from the average of their models and optimizers" in second
    before, after = (float(text) for text in accuracies(first + second))
    assert after > max(before - 2.0, 90.0)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*/rank_*.pt"))
    assert len(set(names)) == sizes[1]


def accuracies(printed: str) -> list[str]:
    """Of the averaged models at the ends of the runs."""
    return [line.split()[-2] for line in printed.splitlines() if line.startswith("averaged model: test accuracy")]
