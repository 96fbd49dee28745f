"""A program: train SGP by copies of the library, each without one package. `module_output(this, FOLDER/EXTRA, ...)`

Each copy is imported and trains in a process of its own, a fork of this one, which has imported the modules of torch.
The program prints a line for each extra: its name, and "ok" or the error.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

TIMEOUT = timedelta(seconds=20)
NUM_RANKS, NUM_STEPS = 2, 12


def train(group: dist.ProcessGroup) -> tuple[list[float], torch.Tensor]:
    """The losses of a rank, and its model after the average."""
    import gossip_modules as gm

    draw = torch.Generator().manual_seed(group.rank())
    x = torch.randn(16, 3, generator=draw)
    model = gm.GossipDataParallel(nn.Linear(3, 1), process_group=group, timeout=TIMEOUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(NUM_STEPS):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.settle()
    model.average_()
    weight = next(model.parameters()).detach().clone()
    model.close()
    return losses, weight


def train_on_all_ranks() -> None:
    """Ranks are threads over Gloo; losses fall, and the averages are equal."""
    from gossip_modules.transport.gloo import gloo_group

    store, results = dist.HashStore(), {}

    def body(rank: int) -> None:
        results[rank] = train(gloo_group(store, rank, NUM_RANKS, TIMEOUT))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == NUM_RANKS, "a rank failed"
    assert all(losses[-1] < losses[0] / 2 for losses, _ in results.values()), results
    assert torch.equal(results[0][1], results[1][1]), results


def check_names(extra: str) -> None:
    """The names of the missing package answer with its name, and methods are found by theirs."""
    import gossip_modules as gm
    from gossip_modules.extras import NAMES, place_of
    from gossip_modules.registry import named

    asked = [partial(getattr, gm, name) for name in (*NAMES, extra) if place_of(name).startswith(extra)]
    if extra == "methods":
        asked.append(partial(named, "diloco"))
    else:
        assert named("diloco").make is gm.DiLoCo
    for ask in asked:
        with pytest.raises(ImportError, match=rf"is in gossip_modules.{extra} \("):
            ask()


def run(folder: Path) -> str:
    """Import the copy in this folder, train, and return "ok" or the error."""
    sys.path.insert(0, str(folder))
    # An installation for editing would find the missing package in the clone.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not finder.__module__.startswith("__editable__")]
    try:
        import gossip_modules as gm

        assert Path(gm.__file__).parents[1] == folder, gm.__file__
        train_on_all_ranks()
        check_names(folder.name)
    except Exception:  # noqa: BLE001 - it is printed
        return repr(traceback.format_exc())
    return "ok"


def forked(folder: Path) -> str:
    """`run` in a fork of this process, which has no library yet."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12, where C++ code has threads
        child = os.fork()
    if not child:
        os.write(writer, run(folder).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as found:
        text = found.read()
    os.waitpid(child, 0)
    return text


if __name__ == "__main__":
    for module in [name for name in sys.modules if name.partition(".")[0] == "gossip_modules"]:
        del sys.modules[module]
    for argument in sys.argv[1:]:
        print(Path(argument).name, forked(Path(argument)))
