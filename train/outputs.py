"""The files that a run leaves in its folder, checkpoints apart."""

from __future__ import annotations

import shutil
from pathlib import Path

from train.world import Agreement

TENSORBOARD, SUMMARY, CURVES, EXPORT = "tensorboard", "summary.json", "curves.png", "averaged_model.safetensors"
TOKENIZER, TRANSLATIONS = "tokenizer.json", "translations"
OUTPUTS = (TENSORBOARD, SUMMARY, CURVES, EXPORT, TOKENIZER, f"{TRANSLATIONS}.*")
"""Of rank 0, as patterns."""


def csv_path(folder: Path, rank: int) -> Path:
    """The table of a rank."""
    return folder / f"rank_{rank:04d}.csv"


def clear_outputs(folder: Path, world: Agreement) -> None:
    """Collective: delete what an earlier run left in `folder`, lest two runs mix, and say so.

    Every rank deletes the tables that it finds, as the folder may be local to its machine; rank 0 the rest.
    """

    def clear() -> list[str]:
        tables = list(folder.glob("rank_*.csv"))
        for path in tables:
            path.unlink(missing_ok=True)  # another rank may be faster
        others = [path for pattern in OUTPUTS if world.rank == 0 for path in folder.glob(pattern)]
        for path in others:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return [path.name for path in (*tables, *others)]

    names = set().union(*world.on_every_rank(clear))
    if names and world.rank == 0:
        print(f"cleared {folder} of an earlier run: {', '.join(sorted(names))}", flush=True)
