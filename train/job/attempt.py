"""Attempts: torchrun --max-restarts starts all workers again, and they must not read what those before have left."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.005


def attempt_store(store: dist.Store, rank: int, size: int, *, timeout: timedelta) -> dist.Store:
    """Collective: a part of `store` that no earlier attempt of the job has touched.

    torchrun's agent serves one store for all attempts. What is in it when workers start again: the addresses of dead
    processes, at which new ones would try to connect, how many steps were taken, and that someone asked to stop.
    TORCHELASTIC_RESTART_COUNT cannot tell attempts apart, as each machine's agent counts its own failures only, and
    none counts a change of members.

    [Note: Attempts] Every process draws a name that was never used. Rank r writes its name at <r> and waits for
    answer/<its name>, which nobody can have written before. Rank 0 answers with its own name, the attempt's, to
    whatever names it sees, also to those of the dead, until every rank has confirmed under the attempt's name. torchrun
    starts no process before all of the attempt before have ended, so no one else answers.

    Args:
        store: the store of the job.
        rank: the rank of this process.
        size: number of processes in this attempt.
        timeout: longest wait for the others.

    Raises:
        TimeoutError: some did not come; they are named.
    """
    names, own = dist.PrefixStore("attempts", store), uuid.uuid4().hex
    if rank == 0:
        _answer(names, own, size, timeout)
        return dist.PrefixStore(own, names)
    names.set(f"{rank}", own)
    try:
        names.wait([f"answer/{own}"], timeout)
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"rank {rank} waited {timeout.total_seconds():g} s for rank 0 to start, and gives up: see what rank 0 has "
            "printed; raise --timeout-seconds if it is slow"
        ) from error
    attempt = names.get(f"answer/{own}").decode()
    names.set(f"{attempt}/started/{rank}", "")
    return dist.PrefixStore(attempt, names)


def _answer(names: dist.Store, own: str, size: int, timeout: timedelta) -> None:
    """Give the name of the attempt to all other ranks; see [Note: Attempts]."""
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    while missing:
        for rank in sorted(missing):
            if names.check([f"{own}/started/{rank}"]):
                missing.remove(rank)
            elif names.check([f"{rank}"]) and (name := names.get(f"{rank}")) != answered.get(rank):
                names.set(f"answer/{name.decode()}", own)
                answered[rank] = name
        if missing and time.monotonic() > deadline:
            late = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(
                f"rank 0 waited {timeout.total_seconds():g} s for rank {late} to start, and gives up: see what was "
                "printed there; raise --timeout-seconds if they are slow"
            )
        time.sleep(_POLL_SECONDS)
