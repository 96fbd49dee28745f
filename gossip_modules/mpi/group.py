"""MpiProcessGroup: messages and collectives of `torch.distributed` over an MPI communicator, by mpi4py."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import wait_for_queue
from ..transport.threads import CallThread
from .library import buffer_of, load_mpi, message_of, operation, reduced_as
from .work import MpiWork

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

BACKEND = "mpi4py"
_numbers = itertools.count()


class MpiProcessGroup(dist.ProcessGroup):
    """A process group over an MPI communicator of its own. No operation blocks; `MpiWork` says how to wait for one.

    Tensors must be contiguous, on the CPU or a GPU. Messages are sent from and received into their memory directly;
    GPU tensors go through pinned memory unless MPI is CUDA-aware. float16 and bfloat16 do not exist in MPI and are
    reduced as float32.

    Args:
        comm: the communicator; nothing else may use it.
        names: the global rank of each member, for error messages.
        timeout: the limit of every wait without a limit of its own.
    """

    def __init__(self, comm: Intracomm, *, names: Sequence[int], timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._mpi = load_mpi()
        self._comm, self._names, self._timeout = comm, list(names), timeout
        self._max_tag = comm.Get_attr(self._mpi.TAG_UB) or 0
        self._completer: CallThread | None = None
        self._works: weakref.WeakSet[MpiWork] = weakref.WeakSet()
        self._is_closed = False
        self._group_name = ""

    def name(self) -> str:
        """The name of the backend, for a new group like this one."""
        return BACKEND

    getBackendName = name

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:  # type: ignore[override]
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"got tensors on {device.type} over MPI, expected cpu or cuda; move the module there")
        return self

    get_backend = _get_backend  # type: ignore[assignment]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name of the group in torch's registry."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    # Point to point.

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> MpiWork:
        """Post a send of the one tensor to rank `peer` of the group."""
        message = self._message(*tensors)
        request = self._comm.Isend(buffer_of(message), peer, self._tag(tag))
        what = f"send of {message.nbytes} bytes to rank {self._names[peer]} (tag {tag})"
        return self._post(request, what, buffers=[message])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> MpiWork:
        """Post a receive of the one tensor from rank `peer` of the group."""
        return self._receive(tensors, peer, f"rank {self._names[peer]}", tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiWork:
        """Post a receive from any rank; the work's `source_rank()` is the sender."""
        return self._receive(tensors, self._mpi.ANY_SOURCE, "any rank", tag)

    def _receive(self, tensors: list[Tensor], source: int, name: str, tag: int) -> MpiWork:
        (x,) = tensors
        message = self._message(x, fill=False)
        request = self._comm.Irecv(buffer_of(message), source, self._tag(tag))
        what = f"receive of {x.nbytes} bytes from {name} (tag {tag})"
        return self._post(request, what, results=[(x, message)], expected_bytes=x.nbytes)

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._max_tag:
            raise ValueError(f"got tag {tag}, expected 0 to {self._max_tag}; another MPI library may have more")
        return tag

    # Collectives.

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:  # type: ignore[override]
        """x <- x of the root."""
        (x,) = tensors
        root = opts.rootRank if opts is not None else 0
        message = self._message(x)
        request = self._comm.Ibcast(buffer_of(message), root)
        return self._collective(request, f"broadcast from rank {self._names[root]}", opts, [(x, message)])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:  # type: ignore[override]
        """Each x <- the reduction of x over all ranks; several tensors have the same dtype and device."""
        return self._reduce(tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:  # type: ignore[override]
        """On the root x <- the reduction of x over all ranks; on the others x is not changed."""
        return self._reduce(tensors, opts, root=opts.rootRank)

    def _reduce(self, tensors: list[Tensor], opts: Any, *, root: int | None = None) -> MpiWork:
        """Each tensor <- its reduction over all ranks, on the root, or on all ranks without a root."""
        kind = opts.reduceOp.op if opts is not None else dist.ReduceOp.SUM
        x = tensors[0] if len(tensors) == 1 else torch.cat([x.view(-1) for x in tensors])
        op = operation(kind, x.dtype)
        message = self._message(x.to(reduced_as(x.dtype)))
        finish = partial(message.div_, self.size()) if kind == dist.ReduceOp.AVG else None
        parts = message.view(-1).split([x.numel() for x in tensors])
        results = [(x, part.view_as(x)) for x, part in zip(tensors, parts, strict=True)]
        buffer = buffer_of(message, is_reduced=True)
        if root is None:
            request = self._comm.Iallreduce(self._mpi.IN_PLACE, buffer, op)
            return self._collective(request, "all-reduce", opts, results, buffers=[message], finish=finish)
        what = f"reduce to rank {self._names[root]}"
        if self.rank() == root:
            request = self._comm.Ireduce(self._mpi.IN_PLACE, buffer, op, root)
            return self._collective(request, what, opts, results, buffers=[message], finish=finish)
        return self._collective(self._comm.Ireduce(buffer, None, op, root), what, opts, buffers=[message])

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> MpiWork:
        """outputs[i] <- x of rank i."""
        (outputs,), (x,) = output_tensors, input_tensors
        message, joint = self._message(x), self._joint(outputs, x)
        request = self._comm.Iallgather(buffer_of(message), buffer_of(joint))
        results = [(output, row.view_as(output)) for output, row in zip(outputs, joint, strict=True)]
        return self._collective(request, "all-gather", opts, results, buffers=[message])

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> MpiWork:
        """output, flat <- x of every rank, in rank order."""
        if output.numel() != self.size() * x.numel():
            raise ValueError(f"got an output of {output.numel()} elements, expected {self.size()} times {x.numel()}")
        message, gathered = self._message(x), self._message(output)
        request = self._comm.Iallgather(buffer_of(message), buffer_of(gathered))
        return self._collective(request, "all-gather", opts, [(output, gathered)], buffers=[message])

    # Its name in older versions of torch.
    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], opts: Any = None
    ) -> MpiWork:
        """output <- run `rank` of x of every rank, in rank order; runs are equally long."""
        if output_split_sizes or input_split_sizes or output.shape != x.shape or x.numel() % self.size():
            raise ValueError(
                f"got {list(x.shape)} and {list(output.shape)} with the sizes {input_split_sizes} and "
                f"{output_split_sizes}, expected equal shapes of a multiple of {self.size()} elements, and no sizes"
            )
        message, received = self._message(x), self._message(output)
        request = self._comm.Ialltoall(buffer_of(message), buffer_of(received))
        return self._collective(request, "all-to-all", opts, [(output, received)], buffers=[message])

    # Its name in older versions of torch.
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def gather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any
    ) -> MpiWork:
        """On the root outputs[i] <- x of rank i."""
        (x,), root = input_tensors, opts.rootRank
        message = self._message(x)
        outputs, joint = [], None
        if self.rank() == root:
            (outputs,) = output_tensors
            joint = self._joint(outputs, x)
        request = self._comm.Igather(buffer_of(message), None if joint is None else buffer_of(joint), root)
        results = [] if joint is None else [(out, row.view_as(out)) for out, row in zip(outputs, joint, strict=True)]
        return self._collective(request, f"gather to rank {self._names[root]}", opts, results, buffers=[message])

    def scatter(  # type: ignore[override]
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> MpiWork:
        """output <- the root's inputs[rank]."""
        (x,), root = output_tensors, opts.rootRank
        message = self._message(x)
        shards = None
        if self.rank() == root:
            (inputs,) = input_tensors
            if len(inputs) != self.size():
                raise ValueError(f"got {len(inputs)} input tensors, expected {self.size()}, one for each rank")
            shards = self._message(torch.stack([shard.reshape(x.shape) for shard in inputs]))
        request = self._comm.Iscatter(None if shards is None else buffer_of(shards), buffer_of(message), root)
        what = f"scatter from rank {self._names[root]}"
        return self._collective(request, what, opts, [(x, message)], buffers=[shards])

    def barrier(self, opts: Any = None) -> MpiWork:
        """Complete when every rank has called it."""
        self._require_open()
        return self._collective(self._comm.Ibarrier(), "barrier", opts)

    # The end.

    def abort(self) -> None:
        """End all operations in flight with an error on this rank; idempotent. The group cannot be used afterwards."""
        self._is_closed = True
        for work in tuple(self._works):
            work.cancel("the process group was closed")
        if self._completer is not None:
            self._completer.close()

    def shutdown(self) -> None:
        """`abort`, then free the communicator if no operation is left in it. Collective and idempotent."""
        is_first = not self._is_closed
        self.abort()
        if is_first and not any(work.is_held for work in self._works):
            self._comm.Free()

    # Between tensors and MPI.

    def _collective(
        self,
        request: Request,
        what: str,
        opts: Any,
        results: Sequence[tuple[Tensor, Tensor]] = (),
        **options: Any,
    ) -> MpiWork:
        timeout = getattr(opts, "timeout", timedelta(0))
        return self._post(request, f"{what} among ranks {self._names}", results, timeout=timeout, **options)

    def _post(
        self,
        request: Request,
        what: str,
        results: Sequence[tuple[Tensor, Tensor]] = (),
        *,
        buffers: Iterable[object] = (),
        timeout: timedelta = timedelta(0),
        finish: Callable[[], object] | None = None,
        expected_bytes: int | None = None,
    ) -> MpiWork:
        """The work of a request. When it is complete, `finish` is called, then the first of each pair <- the second."""
        tensors = [x for x, _ in results]

        def unstage() -> None:
            if finish is not None:
                finish()
            for x, message in results:
                if x.data_ptr() != message.data_ptr():
                    x.copy_(message)
            for device in {x.device for x in tensors}:  # after wait() any stream may use them
                wait_for_queue(device)

        work = MpiWork(
            request,
            what=f"rank {self._names[self.rank()]}: {what}",
            timeout=timeout if timeout > timedelta(0) else self._timeout,
            tensors=tensors,
            buffers=[*buffers, *results],
            finish=unstage,
            expected_bytes=expected_bytes,
            completer=self._get_completer,
        )
        self._works.add(work)
        return work

    def _get_completer(self) -> CallThread:
        if self._completer is None:
            self._completer = CallThread(f"gossip-mpi-{next(_numbers)}")
        return self._completer

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the process group is closed; make a new one")

    def _message(self, x: Tensor, *, fill: bool = True) -> Tensor:
        self._require_open()
        return message_of(x, fill=fill)

    def _joint(self, outputs: Sequence[Tensor], x: Tensor) -> Tensor:
        """A tensor for x of every rank."""
        if len(outputs) != self.size() or any(output.numel() != x.numel() for output in outputs):
            numels = [output.numel() for output in outputs]
            raise ValueError(f"got output tensors of {numels} elements, expected {self.size()} of {x.numel()}")
        return self._message(x.new_empty(self.size(), x.numel()), fill=False)
