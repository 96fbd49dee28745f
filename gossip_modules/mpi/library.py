"""Loading the MPI library, and translating torch's tensors, dtypes and reductions for it."""

from __future__ import annotations

import ctypes
import functools
import sys
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import wait_for_queue

if TYPE_CHECKING:
    from mpi4py.MPI import Op

_MAX_COUNT = 2**31 - 1  # of elements in a message, before version 4 of MPI
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_REDUCED = (
    *(torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)
_OPERATIONS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", **{x: x for x in ("MIN", "MAX", "BAND", "BOR", "BXOR")}}
_LOGICAL = ("MIN", "MAX", "PRODUCT")  # the reductions of bool: their results are again 0 or 1


@functools.cache
def load_mpi() -> ModuleType:
    """Return the module `mpi4py.MPI`. Its first import initialises MPI; the end of Python finalises it.

    [Note: the end of a process] MPI_Finalize waits for all ranks. After an exception a rank would wait there for ranks
    that are waiting for it; so would a rank with an incomplete operation. Such a process prints the error, and then
    aborts the whole job, as torchrun does.

    Raises:
        ImportError: mpi4py or an MPI library is missing.
        RuntimeError: MPI does not allow calls from several threads at once.
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
        raise ImportError(
            f"MPI needs mpi4py and an MPI library ({error}); in a clone: pip install '.[mpi]' brings both, pip "
            "install mpi4py one for the MPI of your cluster; ranks of mpirun over another backend can do with "
            "MASTER_ADDR and MASTER_PORT instead"
        ) from error
    require_threads(MPI.Query_thread())
    report = sys.excepthook

    def abort(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        report(kind, error, traceback)
        abort_at_exit()

    sys.excepthook = abort
    return MPI


def require_threads(level: int) -> None:
    """Raise a RuntimeError unless the thread level, 0 to 3, is 3: MPI_THREAD_MULTIPLE."""
    levels = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
    if levels[level] != levels[-1]:
        raise RuntimeError(
            f"got an MPI library with {levels[level]}, expected {levels[-1]}, since gossip runs in a thread "
            "beside training; take one that is built with threads, as Open MPI is by default, and do not initialise "
            "MPI with less before"
        )


def abort_at_exit() -> None:
    """Make this process abort the whole job when it ends; see [Note: the end of a process]."""
    from mpi4py.run import set_abort_status

    set_abort_status(1)


@functools.cache
def is_cuda_aware() -> bool:
    """Whether this MPI library reads and writes GPU memory itself, as Open MPI and MPICH report it."""
    try:
        return bool(ctypes.CDLL(load_mpi().__file__).MPIX_Query_cuda_support())
    except AttributeError:  # this library has no such function
        return False


def message_of(x: Tensor, *, fill: bool = True) -> Tensor:
    """`x` itself if MPI can access it, else a tensor like it in pinned memory, a copy of x if `fill`.

    Raises:
        ValueError: `x` is not contiguous, or neither on the CPU nor on a GPU.
    """
    if x.layout != torch.strided or not x.is_contiguous():
        raise ValueError(f"got a tensor of shape {tuple(x.shape)} that is not contiguous, expected x.contiguous()")
    if x.device.type == "cpu":
        return x
    if x.device.type != "cuda":
        raise ValueError(f"got a tensor on {x.device}, expected one on cpu or cuda; MPI cannot reach it")
    wait_for_queue(x.device)  # queued kernels may read or write x
    if is_cuda_aware():
        return x
    staging = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
    return staging.copy_(x) if fill else staging


def buffer_of(x: Tensor, *, is_reduced: bool = False) -> Tensor:
    """Return the memory of a message; mpi4py derives its type: bytes, unless it is reduced.

    Raises:
        ValueError: it has more elements than MPI counts.
    """
    x = x.detach().view(-1)
    buffer = x if is_reduced and x.dtype != torch.bool else x.view(torch.uint8)  # MPI reduces no truth values
    require_countable(buffer.numel(), "elements" if is_reduced else "bytes")
    return buffer


def require_countable(count: int, what: str) -> None:
    """Raise a ValueError if a message of `count` of `what` is more than this MPI counts."""
    if count > _MAX_COUNT and not _counts_in_64_bits():
        raise ValueError(
            f"got a message of {count} {what}, expected at most {_MAX_COUNT}, which is all that an MPI library before "
            "version 4 of the standard counts; send a smaller dtype (wire_dtype=torch.bfloat16) or a smaller model"
        )


@functools.cache
def _counts_in_64_bits() -> bool:
    mpi = load_mpi()
    return bool(min(mpi.VERSION, mpi.Get_version()[0]) >= 4)  # of the library that mpi4py was built for, and the loaded


def reduced_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a reduction of tensors of `dtype`: itself, or float32, as MPI has no half precision.

    Raises:
        ValueError: MPI cannot reduce this dtype.
    """
    dtype = _WIDER.get(dtype, dtype)
    if dtype not in _REDUCED:
        raise ValueError(f"got a reduction of {dtype}, expected one of {[*_REDUCED, *_WIDER]}")
    return dtype


def operation(kind: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Op:
    """Return the MPI operation for one of torch's. For AVG it is the sum; the caller divides it.

    Raises:
        ValueError: MPI has no such operation, or not for this dtype.
    """
    is_float = dtype.is_floating_point or dtype.is_complex
    expected = _LOGICAL if dtype == torch.bool else [name for name in _OPERATIONS if is_float or name != "AVG"]
    if kind.name not in expected:
        raise ValueError(f"got a reduction {kind.name} of {dtype}, expected one of {', '.join(expected)}")
    return getattr(load_mpi(), _OPERATIONS[kind.name])
