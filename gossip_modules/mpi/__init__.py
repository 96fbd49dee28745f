"""The `mpi` backend of torch.distributed, over mpi4py."""
