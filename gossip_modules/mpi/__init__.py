"""The MPI backend of torch.distributed, over mpi4py."""
