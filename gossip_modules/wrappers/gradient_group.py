"""DistributedDataParallel over a process group whose all-reduces, when they fail, say which rank is to blame."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..flat.selection import Selection
from ..transport.process_group import ProcessGroupTransport

_OF_NETWORK = re.compile(r"gloo/|timed out|connection", re.IGNORECASE)


class GradientGroup(dist.ProcessGroup):
    """The Gloo group of a transport, for the reducer of DistributedDataParallel.

    The reducer sees an ordinary group: how it scales, buckets and overlaps gradients, and communication hooks, stay as
    they are. Each all-reduce costs one call of Python more. Whoever gives this object to C++ code keeps it alive.

    Args:
        transport: over the same group.
    """

    def __init__(self, transport: ProcessGroupTransport) -> None:
        super().__init__(transport.rank, transport.world_size)  # type: ignore[call-arg]
        backend = transport.group._get_backend(transport.device)
        self._register_backend(transport.device, dist.ProcessGroup.BackendType.GLOO, backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._group = transport.group
        self.failure = NamedFailure(transport, timeout=backend.options._timeout)

    def __deepcopy__(self, memo: dict[int, object]) -> GradientGroup:
        """A copy of a module that is trained with it makes its own."""
        return self

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """As `ProcessGroup.allreduce`."""
        with without_context():
            work = self._group.allreduce(tensors, dist.AllreduceOptions() if opts is None else opts)
        self.failure.expect(work.wait)
        return work

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """As `ProcessGroup.broadcast`. Without it the reducer would post it while it holds the GIL.

        [Note: the GIL and the queue] A thread of Gloo that is the last to free work needs the GIL for its tensors, and
        holds the lock of the group's queue meanwhile. Who posts with the GIL waits for that lock for ever: the reducer
        does so where it rebuilds its buckets, in the second forward, with a group whose method is not of Python.
        """
        return self._group.broadcast(tensors, dist.BroadcastOptions() if opts is None else opts)


@contextlib.contextmanager
def without_context() -> Iterator[None]:
    """Inside, work that is posted does not hold the Python context of the backward.

    [Note: context of a backward] Since torch 2.14 a backward puts a `contextvars.Context` into thread-local storage and
    takes it out at its end. Gloo's work keeps a copy of that storage. If a thread of Gloo frees the work last, it needs
    the GIL for that, while it holds the lock of the group's queue: see [Note: the GIL and the queue]. Work without a
    Python object needs no GIL.
    """
    if not hasattr(torch._C, "_remove_obj_from_tls") or not torch._C._is_key_in_tls("context"):
        yield  # older torch leaves the last context where it is
        return
    context = torch._C._get_obj_in_tls("context")
    torch._C._remove_obj_from_tls("context")
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls("context", context)


class NamedFailure:
    """Turns errors of collectives into ones that name who failed.

    [Note: errors of a backward] The reducer waits for all-reduces in a callback of the autograd engine, which nobody
    can catch. But callbacks run in their order, and that one is queued after the last all-reduce has been posted. So
    each all-reduce queues one of ours, which waits for it first, and raises an error that names who failed. Nothing of
    Python runs in the threads of Gloo, which end when they will.

    Args:
        transport: over the ranks of the collectives.
        timeout: the timeout of the collectives.
    """

    def __init__(self, transport: ProcessGroupTransport, *, timeout: timedelta) -> None:
        self._transport = transport
        self._timeout = timeout

    def expect(self, wait: Callable[[], Any]) -> None:
        """Inside a backward: wait for the posted work when all gradients are there, with errors that name ranks."""
        if torch._C._current_graph_task_id() == -1:  # of a rank that has joined others: see `Join`
            return
        start = time.monotonic()

        def wait_for_it() -> None:
            try:
                wait()
            except RuntimeError as error:
                self._name(error, "averaging gradients", start)

        torch.autograd.Variable._execution_engine.queue_callback(wait_for_it)

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Errors of collectives inside name who failed; others stay as they are. Called by the thread that trains."""
        self._transport.thread = threading.get_ident()
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self._name(error, what, start)

    def _name(self, error: RuntimeError, what: str, start: float) -> NoReturn:
        if not _OF_NETWORK.search(str(error)):
            raise error
        doing = f"{what} among ranks {list(self._transport.names)}"
        self._transport.fail(error, doing, time.monotonic() - start, timeout=self._timeout)


@contextlib.contextmanager
def leaving_alone(module: nn.Module, selection: Selection) -> Iterator[None]:
    """Inside, a DistributedDataParallel that is made of the module leaves alone what the selection ignores."""
    name = "_ddp_params_and_buffers_to_ignore"
    before = vars(module).get(name)
    ignored = selection.ignored(module)
    # It looks up parameters of the module itself with a point in front of their names, and everything without.
    setattr(module, name, [*ignored, *(f".{key}" for key in ignored)])
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


class NamedReplica(DistributedDataParallel):
    """DistributedDataParallel whose errors, over Gloo, name who failed.

    Args:
        module: as for DistributedDataParallel.
        transport: over the ranks of its group.
        what: names its construction in errors.
        ddp_options: any argument of DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, transport: ProcessGroupTransport, *, what: str, **ddp_options: Any) -> None:
        self._failure: NamedFailure | None = None
        self._gradient_group: GradientGroup | None = None
        if transport.backend == "gloo":
            self._gradient_group = GradientGroup(transport)
            self._failure = self._gradient_group.failure
            transport.barrier(what=what)  # a rank that is not there is named by this
        with self._naming(what):
            super().__init__(module, **ddp_options)

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        group = self.process_group
        if self._gradient_group is not None:
            self.process_group = self._gradient_group  # for the reducer, which this makes
        try:
            super()._ddp_init_helper(*args, **kwargs)
        finally:
            self.process_group = group

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As DistributedDataParallel; errors of the hook's communication name the failed rank too."""
        failure = self._failure
        if failure is None:
            super().register_comm_hook(state, hook)
            return

        @functools.wraps(hook)
        def named(state: object, bucket: Any) -> Any:
            with without_context():
                future = hook(state, bucket)
            failure.expect(future.wait)
            return future

        super().register_comm_hook(state, named)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._naming("preparing a forward"):  # buckets and buffers
            return super()._pre_forward(*inputs, **kwargs)

    def _naming(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._failure is None else self._failure.naming(what)
