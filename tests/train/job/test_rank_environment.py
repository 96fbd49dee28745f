"""Which rank this process is, by what torchrun, mpirun and srun leave in the environment."""

from __future__ import annotations

import pytest

from train.job.rank_environment import RankEnvironment, rank_environment, rendezvous_address

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
}
# The shell of an sbatch of seven tasks, and the sixth task of an srun within a job.
BATCH = {"SLURM_JOB_ID": "100", "SLURM_NTASKS": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,07],login",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, RankEnvironment()),
        (TORCHRUN, RankEnvironment(2, 4, 0, 2, "torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, RankEnvironment(1, 2, 0, 1, "manual")),
        (OPEN_MPI, RankEnvironment(5, 8, 1, 4, "mpirun")),
        (HYDRA, RankEnvironment(1, 2, 1, 2, "mpirun")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, RankEnvironment(1, 2, 0, 1, "mpirun")),
        (STEP, RankEnvironment(5, 7, 1, 2, "srun")),
        ({**STEP, "SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}, RankEnvironment(6, 7, 0, 1, "srun")),
        (BATCH, RankEnvironment()),  # a plain command in a job's shell
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, RankEnvironment()),
        ({**STEP, **TORCHRUN}, RankEnvironment(2, 4, 0, 2, "torchrun")),  # srun torchrun
        ({**OPEN_MPI, **TORCHRUN}, RankEnvironment(2, 4, 0, 2, "torchrun")),
        ({**STEP, **OPEN_MPI}, RankEnvironment(5, 8, 1, 4, "mpirun")),  # mpirun, whose daemons srun has started
        ({**STEP, **HYDRA}, RankEnvironment(1, 2, 1, 2, "mpirun")),
        ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "7"}, RankEnvironment(5, 7, 1, 2, "srun")),  # srun --mpi=pmi2
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}, RankEnvironment()),
    ],
)
def test_the_innermost_launcher_counts(environment: dict[str, str], expected: RankEnvironment) -> None:
    assert rank_environment(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, r"got WORLD_SIZE='', expected a number; start with"),
        ({"WORLD_SIZE": "2"}, r"got RANK=''"),
        ({**TORCHRUN, "RANK": "one"}, r"got RANK='one'"),
        ({**TORCHRUN, "RANK": "4"}, r"got rank 4 of 4, 0 of 2 on this machine, from torchrun's .* unset"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "4"}, r"got rank 5 of 8, 4 of 4 .* mpirun's"),
        (
            {**OPEN_MPI, "RANK": "5", "WORLD_SIZE": "4"},
            r"got RANK=5 and WORLD_SIZE=4, but OMPI_COMM_WORLD_RANK=5 and OMPI_COMM_WORLD_SIZE=8, expected one",
        ),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "7x"}, r"got SLURM_STEP_NUM_TASKS='7x', expected a number"),
        ({**STEP, "SLURM_NODEID": ""}, r"got SLURM_NODEID='', expected a number"),
        ({**STEP, "SLURM_NODEID": "4"}, r"got SLURM_NODEID=4, expected less than the 4 nodes"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "many"}, r"TASKS_PER_NODE='many', expected such as 2\(x3\),1"),
    ],
)
def test_contradictions_are_errors(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_environment(environment)


def test_ranks_that_somebody_set_by_hand_may_repeat_the_launcher() -> None:
    environment = {**OPEN_MPI, "RANK": "5", "WORLD_SIZE": "8"}
    assert rank_environment(environment).launcher == "manual"


def test_srun_ranks_meet_at_the_first_host_of_their_step() -> None:
    address = rendezvous_address(STEP)
    assert address is not None
    host, port = address
    assert host == "gpu03"
    assert 15000 <= port < 30000
    # Another step of the same job, at the same time on the same host, has another port.
    assert rendezvous_address({**STEP, "SLURM_STEP_ID": "4"}) == ("gpu03", port + 1)
    assert rendezvous_address({**STEP, "SLURM_STEP_NODELIST": "alone"}) == ("alone", port)
    assert rendezvous_address({**STEP, "SLURM_STEP_NODELIST": "rack[1,3]-[2-4],b"}) == ("rack1-2", port)
    assert rendezvous_address({**STEP, "MASTER_ADDR": "here"}) == ("here", port)
    assert rendezvous_address({**STEP, "MASTER_ADDR": "here", "MASTER_PORT": "29500"}) == ("here", 29500)
    with pytest.raises(ValueError, match="list of hosts '' from SLURM"):
        rendezvous_address({**STEP, "SLURM_STEP_NODELIST": ""})


def test_other_ranks_meet_where_the_user_says() -> None:
    assert rendezvous_address(OPEN_MPI) is None
    # Ranks beside mpirun itself know of no step, so those whose daemons srun has started must not meet there either.
    assert rendezvous_address({**STEP, **OPEN_MPI}) is None
    assert rendezvous_address({"MASTER_ADDR": "here", "MASTER_PORT": "29500"}) == ("here", 29500)
    with pytest.raises(ValueError, match="MASTER_ADDR=here and MASTER_PORT=None, expected both or neither"):
        rendezvous_address({"MASTER_ADDR": "here"})
    with pytest.raises(ValueError, match="MASTER_PORT='http'"):
        rendezvous_address({"MASTER_ADDR": "here", "MASTER_PORT": "http"})
