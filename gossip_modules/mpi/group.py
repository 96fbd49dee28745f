"""MpiProcessGroup: messages and collectives of `torch.distributed` over an MPI communicator, by mpi4py."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .barrier import timed_barrier
from .library import bytes_of, elements_of, load_mpi, message_of, operation, reduced_as
from .work import Completer, MpiWork

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Op, Request

BACKEND = "mpi4py"
_numbers = itertools.count()


class MpiProcessGroup(dist.ProcessGroup):
    """A process group over an MPI communicator of its own. No operation blocks; `MpiWork` says how to wait for one.

    Tensors must be contiguous, on the CPU or a GPU. Messages are sent from and received into their memory directly;
    those of a GPU go through pinned memory unless MPI is CUDA-aware. float16 and bfloat16 do not exist in MPI and are
    reduced as float32.

    Args:
        comm: the communicator; nothing else may use it.
        names: the global rank of each member, for error messages.
        timeout: the limit of every wait that gives none.
    """

    def __init__(self, comm: Intracomm, *, names: Sequence[int], timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._mpi = load_mpi()
        self._comm = comm
        self._names = list(names)
        self._timeout = timeout
        self._barrier_tag = comm.Get_attr(self._mpi.TAG_UB) or 0  # the highest tag; messages use those below it
        self._completer = Completer(f"gossip-mpi-{next(_numbers)}")
        self._works: weakref.WeakSet[MpiWork] = weakref.WeakSet()
        self._is_closed = False
        self._group_name = ""

    def name(self) -> str:
        """The name of the backend, for a new group like this one."""
        return BACKEND

    getBackendName = name

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:  # type: ignore[override]
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"no MPI for tensors on {device.type}, expected cpu or cuda")
        return self

    get_backend = _get_backend  # type: ignore[assignment]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which torch registered the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    # Point to point.

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> MpiWork:
        """Post a send of the one tensor to rank `peer` of the group."""
        (x,) = tensors
        message = self._message(x)
        what = f"send of {x.numel() * x.element_size()} bytes to rank {self._names[peer]} (tag {tag})"
        return self._post(self._comm.Isend(bytes_of(message), peer, self._tag(tag)), what, buffers=[message])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> MpiWork:
        """Post a receive of the one tensor from rank `peer` of the group."""
        return self._receive(tensors, peer, f"rank {self._names[peer]}", tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiWork:
        """Post a receive from any rank; the work's `source_rank()` is the sender."""
        return self._receive(tensors, self._mpi.ANY_SOURCE, "any rank", tag)

    # Collectives.

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:  # type: ignore[override]
        """x <- x of the root."""
        (x,) = tensors
        root = opts.rootRank if opts is not None else 0
        message = self._message(x)
        request = self._comm.Ibcast(bytes_of(message), root)
        return self._post(request, f"broadcast from rank {self._names[root]}", opts, [(x, message)])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:  # type: ignore[override]
        """x <- the reduction of x over all ranks."""
        (x,) = tensors
        op, message, finish = self._reduction(x, opts)
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, elements_of(message), op)
        return self._post(request, "all-reduce", opts, [(x, message)], finish=finish)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        """`allreduce` of each tensor; all have the same dtype and device."""
        flat = torch.cat([x.view(-1) for x in tensors])
        op, message, finish = self._reduction(flat, opts)

        def split() -> None:
            finish()
            flat.copy_(message)
            for x, reduced in zip(tensors, flat.split([x.numel() for x in tensors])):
                x.copy_(reduced.view_as(x))

        request = self._comm.Iallreduce(self._mpi.IN_PLACE, elements_of(message), op)
        return self._post(request, "all-reduce", opts, buffers=[message], tensors=tensors, finish=split)

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:  # type: ignore[override]
        """On the root x <- the reduction of x over all ranks; on the others x is not changed."""
        (x,) = tensors
        root = opts.rootRank
        op, message, finish = self._reduction(x, opts)
        what = f"reduce to rank {self._names[root]}"
        if self.rank() == root:
            request = self._comm.Ireduce(self._mpi.IN_PLACE, elements_of(message), op, root)
            return self._post(request, what, opts, [(x, message)], finish=finish)
        request = self._comm.Ireduce(elements_of(message), None, op, root)
        return self._post(request, what, opts, buffers=[message])

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> MpiWork:
        """outputs[i] <- x of rank i."""
        (outputs,), (x,) = output_tensors, input_tensors
        message = self._message(x)
        gathered, finish = self._joint(outputs, x)
        request = self._comm.Iallgather(bytes_of(message), bytes_of(gathered))
        return self._post(request, "all-gather", opts, buffers=[message, gathered], tensors=outputs, finish=finish)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> MpiWork:
        """output, flat <- x of every rank, in rank order."""
        if output.numel() != self.size() * x.numel():
            raise ValueError(f"got an output of {output.numel()} elements, expected {self.size()} times {x.numel()}")
        message, gathered = self._message(x), self._message(output)
        request = self._comm.Iallgather(bytes_of(message), bytes_of(gathered))
        return self._post(request, "all-gather", opts, [(output, gathered)], buffers=[message])

    # Its name in older versions of torch.
    _allgather_base = all_gather_single  # type: ignore[assignment]

    def gather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any
    ) -> MpiWork:
        """On the root outputs[i] <- x of rank i."""
        (x,), root = input_tensors, opts.rootRank
        message = self._message(x)
        what = f"gather to rank {self._names[root]}"
        if self.rank() != root:
            return self._post(self._comm.Igather(bytes_of(message), None, root), what, opts, buffers=[message])
        (outputs,) = output_tensors
        gathered, finish = self._joint(outputs, x)
        request = self._comm.Igather(bytes_of(message), bytes_of(gathered), root)
        return self._post(request, what, opts, buffers=[message, gathered], tensors=outputs, finish=finish)

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
        request = self._comm.Iscatter(bytes_of(shards) if shards is not None else None, bytes_of(message), root)
        return self._post(request, f"scatter from rank {self._names[root]}", opts, [(x, message)], buffers=[shards])

    def barrier(self, opts: Any = None) -> MpiWork:
        """Complete when every rank has called it."""
        self._require_open()
        return self._post(self._comm.Ibarrier(), "barrier", opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called it; see `timed_barrier`.

        Raises:
            RuntimeError: ranks are missing after the timeout; the message names them.
        """
        self._require_open()
        timeout = timeout or self._timeout
        timed_barrier(self._comm, range(self.size()), names=self._names, timeout=timeout, tag=self._barrier_tag)

    # The end.

    def abort(self) -> None:
        """End all operations in flight with an error on this rank; idempotent. The group cannot be used afterwards."""
        self._is_closed = True
        for work in tuple(self._works):
            work.cancel("the process group was closed")
        self._completer.close()

    def shutdown(self) -> None:
        """`abort`, then free the communicator if no operation is left in it. Collective and idempotent."""
        is_first = not self._is_closed
        self.abort()
        if is_first and not any(work.is_held for work in self._works):
            self._comm.Free()

    # Between tensors and MPI.

    def _receive(self, tensors: list[Tensor], source: int, name: str, tag: int) -> MpiWork:
        (x,) = tensors
        message = self._message(x, fill=False)
        num_bytes = x.numel() * x.element_size()
        request = self._comm.Irecv(bytes_of(message), source, self._tag(tag))
        what = f"receive of {num_bytes} bytes from {name} (tag {tag})"
        return self._post(request, what, pairs=[(x, message)], expected_bytes=num_bytes)

    def _post(
        self,
        request: Request,
        what: str,
        opts: Any = None,
        pairs: Sequence[tuple[Tensor, Tensor]] = (),
        *,
        buffers: Sequence[object] = (),
        tensors: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
        expected_bytes: int | None = None,
    ) -> MpiWork:
        """The work of a request. When it is complete, `finish` is called, then the first of each pair <- the second."""
        timeout = getattr(opts, "timeout", timedelta(0))
        results = tensors or [x for x, _ in pairs]

        def unstage() -> None:
            if finish is not None:
                finish()
            for x, message in pairs:
                if x is not message:
                    x.copy_(message)
            for device in {x.device for x in results if x.is_cuda}:  # after wait() any stream may use them
                torch.cuda.current_stream(device).synchronize()

        among = "" if expected_bytes is not None or what.startswith("send") else f" among ranks {self._names}"
        work = MpiWork(
            request,
            what=f"rank {self._names[self.rank()]}: {what}{among}",
            timeout=timeout if timeout > timedelta(0) else self._timeout,
            tensors=results,
            buffers=[*buffers, *pairs],
            finish=unstage,
            expected_bytes=expected_bytes,
            completer=self._completer,
        )
        self._works.add(work)
        return work

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the process group is closed; make a new one")

    def _message(self, x: Tensor, *, fill: bool = True) -> Tensor:
        self._require_open()
        return message_of(x, fill=fill)

    def _reduction(self, x: Tensor, opts: Any) -> tuple[Op, Tensor, Callable[[], None]]:
        """The MPI operation, the tensor that it reduces instead of x, and a function to call when it is complete."""
        kind = opts.reduceOp.op if opts is not None else dist.ReduceOp.SUM
        op = operation(kind, x.dtype)
        message = self._message(x.to(reduced_as(x.dtype)))
        divisor = self.size() if kind == dist.ReduceOp.AVG else 1

        def finish() -> None:
            if divisor != 1:
                message.div_(divisor)

        return op, message, finish

    def _joint(self, outputs: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """A tensor for x of every rank, and a function that copies its rows into `outputs`."""
        if len(outputs) != self.size() or any(output.numel() != x.numel() for output in outputs):
            numels = [output.numel() for output in outputs]
            raise ValueError(f"got output tensors of {numels} elements, expected {self.size()} of {x.numel()}")
        joint = self._message(x.new_empty(self.size(), x.numel()), fill=False)

        def split() -> None:
            for output, row in zip(outputs, joint):
                output.copy_(row.view_as(output))

        return joint, split

    def _tag(self, tag: int) -> int:
        if not 0 <= tag < self._barrier_tag:
            raise ValueError(f"got tag {tag}, expected 0 to {self._barrier_tag - 1}; another MPI library may have more")
        return tag
