"""Loading the MPI library, and translating torch's tensors, dtypes and reductions for it."""

from __future__ import annotations

import ctypes
import functools
import sys
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py.MPI import Op

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_MAX_COUNT = 2**31 - 1  # of elements in a message, before version 4 of MPI
_LOGICAL = ("MIN", "MAX", "PRODUCT")  # the reductions of bool: their results are again 0 or 1


@functools.cache
def load_mpi() -> ModuleType:
    """The module `mpi4py.MPI`, which initialises MPI when it is first imported and finalises it when Python ends.

    [Note: the end of a process] MPI_Finalize waits for all ranks. A rank that ends with an exception would wait there
    for ranks that are waiting for it; so would a rank with an operation that never completed. Such a process aborts the
    whole job instead, as torchrun does, after it has printed the error.

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
            f"MPI needs mpi4py and an MPI library ({error}); pip install 'gossip-modules[mpi]' brings both, pip "
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
            f"got an MPI library that provides {levels[level]}, expected {levels[-1]}, since gossip runs in a thread "
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
    torch.cuda.current_stream(x.device).synchronize()  # queued kernels may read or write x
    if is_cuda_aware():
        return x
    staging = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
    return staging.copy_(x) if fill else staging


def bytes_of(x: Tensor) -> list[Any]:
    """The memory of a message, as mpi4py takes it, to be moved only.

    Raises:
        ValueError: it has more bytes than MPI counts.
    """
    mpi = load_mpi()
    num_bytes = x.numel() * x.element_size()
    require_countable(num_bytes, "bytes")
    return [mpi.buffer.fromaddress(x.data_ptr(), num_bytes), mpi.BYTE]


def elements_of(x: Tensor) -> list[Any]:
    """The memory of a message, as mpi4py takes it, to be reduced; its dtype is one that `reduced_as` gives.

    Raises:
        ValueError: it has more elements than MPI counts.
    """
    require_countable(x.numel(), "elements")
    return [load_mpi().buffer.fromaddress(x.data_ptr(), x.numel() * x.element_size()), _mpi_types()[x.dtype]]


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
    return bool(min(mpi.VERSION, mpi.Get_version()[0]) >= 4)  # what mpi4py was built for, and what is loaded


def reduced_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are reduced: itself, or float32 for half precision, which MPI lacks.

    Raises:
        ValueError: MPI cannot reduce this dtype.
    """
    dtype = _WIDER.get(dtype, dtype)
    if dtype not in _mpi_types():
        raise ValueError(f"got a reduction of {dtype}, expected one of {[*_mpi_types(), *_WIDER]}")
    return dtype


def operation(kind: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Op:
    """The MPI operation for one of torch's. For AVG it is the sum, which the caller divides.

    Raises:
        ValueError: MPI has no such operation, or not for this dtype.
    """
    mpi, kinds = load_mpi(), dist.ReduceOp
    operations: dict[dist.ReduceOp.RedOpType, Op] = {
        kinds.SUM: mpi.SUM,
        kinds.AVG: mpi.SUM,
        kinds.PRODUCT: mpi.PROD,
        kinds.MIN: mpi.MIN,
        kinds.MAX: mpi.MAX,
        kinds.BAND: mpi.BAND,
        kinds.BOR: mpi.BOR,
        kinds.BXOR: mpi.BXOR,
    }
    is_float = dtype.is_floating_point or dtype.is_complex
    expected = _LOGICAL if dtype == torch.bool else [k.name for k in operations if is_float or k != kinds.AVG]
    if kind.name not in expected:
        raise ValueError(f"got a reduction {kind.name} of {dtype}, expected one of {', '.join(expected)}")
    return operations[kind]


@functools.cache
def _mpi_types() -> dict[torch.dtype, Any]:
    """The MPI type of each dtype that MPI can reduce."""
    mpi = load_mpi()
    return {
        torch.float32: mpi.FLOAT,
        torch.float64: mpi.DOUBLE,
        torch.bool: mpi.UINT8_T,
        torch.uint8: mpi.UINT8_T,
        torch.int8: mpi.INT8_T,
        torch.int16: mpi.INT16_T,
        torch.int32: mpi.INT32_T,
        torch.int64: mpi.INT64_T,
        torch.complex64: mpi.C_FLOAT_COMPLEX,
        torch.complex128: mpi.C_DOUBLE_COMPLEX,
    }
