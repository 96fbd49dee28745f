"""RankEnvironment: which process of the job this is, by what its launcher has left in the environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_FIRST_PORT, _NUM_PORTS = 15000, 15000  # below those that systems hand out


@dataclass(frozen=True)
class RankEnvironment:
    """A process among those that were started together.

    Raises:
        ValueError: the numbers contradict each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Processes on this machine."""
    launcher: str = "none"
    """torchrun, mpirun, srun; manual: somebody has set RANK and WORLD_SIZE; none: a process alone."""

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise ValueError(
                f"got rank {self.rank} of {self.size}, {self.local_rank} of {self.local_size} on this machine, from "
                f"{self.launcher}'s environment variables, expected ranks from 0 to below their counts; unset what "
                "another launcher has left"
            )


# Launcher, then the variables of rank, size, local rank and local size; the first launcher whose rank is set counts.
# torchrun may run under mpirun or srun, once per machine, and mpirun's daemons under srun: the inner one is meant.
_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        *("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_STEP_SIZE = "SLURM_STEP_NUM_TASKS"


def rank_environment(environment: Mapping[str, str]) -> RankEnvironment:
    """What torchrun, mpirun (Open MPI, or MPICH and its kin by PMI) or srun says; without them, a process alone.

    A plain command in the shell of an `sbatch` or `salloc` is alone too, whatever the size of the allocation: only the
    tasks of an `srun` with several belong together.

    Raises:
        ValueError: a variable is missing, no number, or contradicts another one.
    """
    for launcher, *names in _VARIABLES:
        if names[0] in environment or names[1] in environment:
            if names[0] == "PMI_RANK" and names[2] not in environment and _STEP_SIZE in environment:
                break  # srun speaks PMI as well, and then it alone knows of machines
            return _numbers(environment, launcher, names)
    if _STEP_SIZE in environment and _number(environment, _STEP_SIZE) > 1:
        rank, size = _number(environment, "SLURM_PROCID"), _number(environment, _STEP_SIZE)
        tasks = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        node = _number(environment, "SLURM_NODEID")
        if node >= len(tasks):
            raise ValueError(f"got SLURM_NODEID={node}, expected less than the {len(tasks)} nodes of the step")
        return RankEnvironment(rank, size, _number(environment, "SLURM_LOCALID"), tasks[node], "srun")
    return RankEnvironment()


def rendezvous_address(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Where rank 0 of the tasks of an srun, or of an mpirun, is to serve the key-value store.

    MASTER_ADDR and MASTER_PORT; what is missing of them is, under srun, the first host of the step and a port that
    follows from the number of the job. Not under an mpirun within a job: where that runs itself, ranks know of no step.

    Returns:
        None: nobody says.

    Raises:
        ValueError: only one of the two is set, not under srun, or the port is no number.
    """
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if rank_environment(environment).launcher == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        number = _number(environment, "SLURM_JOB_ID") * 7 + _number(environment, "SLURM_STEP_ID")
        default_port = _FIRST_PORT + number % _NUM_PORTS
        return host or _first_host(nodes), _number(environment, "MASTER_PORT") if port else default_port
    if (host is None) != (port is None):
        raise ValueError(f"got MASTER_ADDR={host} and MASTER_PORT={port}, expected both or neither")
    return (host, _number(environment, "MASTER_PORT")) if host is not None else None


def _numbers(environment: Mapping[str, str], launcher: str, names: list[str]) -> RankEnvironment:
    rank, size = (_number(environment, name) for name in names[:2])
    local_rank, local_size = names[2:]
    if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environment:
        launcher = "manual"
        for _, other_rank, other_size, *_ in _VARIABLES[1:]:
            other = environment.get(other_rank, str(rank)), environment.get(other_size, str(size))
            if other != (str(rank), str(size)):
                raise ValueError(
                    f"got RANK={rank} and WORLD_SIZE={size}, but {other_rank}={other[0]} and {other_size}={other[1]}, "
                    "expected one launcher; unset RANK and WORLD_SIZE"
                )
    if local_rank not in environment or local_size not in environment:  # then it is taken to be alone on its machine
        return RankEnvironment(rank, size, launcher=launcher)
    return RankEnvironment(rank, size, _number(environment, local_rank), _number(environment, local_size), launcher)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ValueError(f"got {name}={text!r}, expected a number; start with torchrun, mpirun or srun, which set it")
    return int(text)


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's "2(x3),1" is 2, 2, 2, 1."""
    tasks = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"got SLURM_STEP_TASKS_PER_NODE={text!r}, expected such as 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _first_host(nodes: str) -> str:
    """The first of a list of hosts such as "gpu[03-05,07],login": gpu03."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"got a list of hosts {nodes!r} from SLURM, expected such as gpu[03-05]; set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
