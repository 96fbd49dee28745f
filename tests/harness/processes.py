"""Ranks as processes, where only a real process will do: DistributedDataParallel, Join, a peer that dies."""

from __future__ import annotations

import functools
import io
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PRELOADED = [
    *("torch", "torch.distributed", "torch.nn.parallel", "gossip_modules"),
    "torch._dynamo",  # the first optimizer or training forward loads it
    # Modules of tests import these; each fork loads the module that it runs.
    *("pytest", "networkx", "gossip_modules.testing", "tests.harness.ranks"),
    # A training run imports these when it needs them.
    *("train.training.process", "train.tasks.images.task", "train.tasks.translation.task", "torch.utils.tensorboard"),
    *("visualization.curves", "sklearn.datasets", "transformers.models.marian.modeling_marian"),
    "tests.harness.frozen",  # no pass of the garbage collector in a fork visits, and so copies, what is imported here
]


class Outcome(NamedTuple):
    """How one process ended."""

    result: Any = None  # what its body returned: tensors and plain values
    error: str = ""  # type and text of the exception that ended it; empty after a result or a signal
    seconds: float = float("nan")  # from start_clock() to that end
    exit_code: int | None = None  # negative: the signal; None: had to be killed


_context = multiprocessing.get_context("forkserver")
_server: Any = multiprocessing.forkserver._forkserver
_SHARED = ("_forkserver_address", "_forkserver_authkey")  # the second from Python 3.14 on


def start_server() -> None:
    """Start the server of forks, which imports PRELOADED meanwhile.

    A process of Python has one such server, and the first code that asks for it says what the server imports. Code
    under test asks for one with other imports; then each later process of the tests would import the rest by itself.
    """
    _context.set_forkserver_preload(PRELOADED)
    _server.ensure_running()


def shared_server() -> dict[str, Any]:
    """What `use_server` takes in another process, after `start_server` in this one."""
    return {name: getattr(_server, name) for name in _SHARED if hasattr(_server, name)}


def use_server(shared: dict[str, Any]) -> None:
    """Have the server of another process, which ends with that one, make the forks for this one.

    Python has no function for it: each process starts a server of its own, whose imports take 14 s.
    """
    for name, value in shared.items():
        setattr(_server, name, value)
    _server._forkserver_alive_fd = os.pipe()[1]  # each request has one
    _server.ensure_running = lambda: None


@functools.cache
def wait_for_server() -> None:
    """Wait until the server has imported PRELOADED, which takes long on a loaded machine."""
    start_server()
    process = _context.Process(target=os.getpid)
    process.start()
    process.join()
    process.close()


_clock = time.monotonic()


def start_clock() -> None:
    """What `Outcome.seconds` counts from, in the process that calls it."""
    global _clock
    _clock = time.monotonic()


def run_processes(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    expect_result: bool = True,
    hung: Sequence[int] = (),
    backend: str | None = "gloo",
    timeout: float = 45.0,
) -> list[Outcome]:
    """`body(rank, *args)` in `world_size` processes with torch.distributed initialised; how each ended, in rank order.

    The processes are forks of a server that has imported what they need, so that only the first one waits for that.

    Args:
        world_size: number of processes.
        body: a function of a test module.
        args: plain values.
        expect_result: raise an AssertionError when any process ends without a result.
        hung: ranks that do not end by themselves; they are killed when all others have ended.
        backend: of the default group; with "nccl" ranks share the GPUs. None: the body makes and ends the group itself.
        timeout: seconds from when the server is ready; a process that has not ended then is killed.
    """
    wait_for_server()
    deadline = time.monotonic() + timeout
    outcomes = [Outcome()] * world_size
    with tempfile.TemporaryDirectory() as folder:
        readers, processes = [], []
        for rank in range(world_size):
            reader, writer = _context.Pipe(duplex=False)
            process = _context.Process(target=_main, args=(rank, world_size, folder, backend, writer, body, args))
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        waiting = [reader for rank, reader in enumerate(readers) if rank not in hung]
        while waiting and (ready := wait(waiting, max(deadline - time.monotonic(), 0))):
            for reader in [reader for reader in waiting if reader in ready]:
                waiting.remove(reader)
                try:
                    message = io.BytesIO(reader.recv_bytes())
                except EOFError:  # ended by a signal: its exit code says which
                    continue
                outcomes[readers.index(reader)] = Outcome(*torch.load(message, weights_only=True))
        for rank, process in sorted(enumerate(processes), key=lambda item: item[0] in hung):
            process.join(0 if rank in hung else max(deadline - time.monotonic(), 0))
            outcomes[rank] = outcomes[rank]._replace(exit_code=process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join(10)
            process.close()  # raises where it still runs
    if expect_result:
        assert all(outcome.exit_code == 0 for outcome in outcomes), outcomes
    return outcomes


def _main(
    rank: int,
    world_size: int,
    folder: str,
    backend: str | None,
    writer: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        # NCCL refuses ranks of one host that share a card; hosts talk over sockets.
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "500"  # a rank ends four times so long after an error
    if backend is not None:
        # A file, not a TCP server in rank 0: no rank is needed by all others.
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        # Nobody begins, and maybe ends, while another one still connects.
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
        del os.environ["TORCH_DIST_INIT_BARRIER"]
    start_clock()
    try:
        result = body(rank, *args)
    except Exception as error:
        _send(writer, Outcome(None, f"{type(error).__name__}: {error}", time.monotonic() - _clock))
        raise  # and end as a script would: whether that hangs is part of the tests
    _send(writer, Outcome(result, "", time.monotonic() - _clock))
    if backend is not None:
        dist.destroy_process_group()


def _send(writer: Connection, outcome: Outcome) -> None:
    message = io.BytesIO()
    torch.save(tuple(outcome[:3]), message)
    writer.send_bytes(message.getvalue())
    writer.close()
