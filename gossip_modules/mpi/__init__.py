"""The MPI backend of torch.distributed, over mpi4py."""

from .backend import init_mpi_process_group, mpi_store, register_mpi_backend

__all__ = [
    "init_mpi_process_group",
    "mpi_store",
    "register_mpi_backend",
]
