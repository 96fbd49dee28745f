#!/usr/bin/env bash
#SBATCH --job-name=gossip
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=30:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#
# Trains on a SLURM allocation: one torchrun per node, meeting on the first host. Arguments are the training script's:
#
#   sbatch --nodes=8 --gpus-per-node=8 job_scripts/launch.sh --recipe sgp --dataset imagefolder --data-dir /imagenet
#   SCRIPT=train/translate.py sbatch --nodes=8 --gpus-per-node=1 job_scripts/launch.sh --recipe sgp
#   DRY_RUN=1 job_scripts/launch.sh --recipe sgp    # inside an allocation: prints the command and ends
#
# Submit from the top of the repository, or with --chdir. Environment:
#   SCRIPT             what to train with (train/gossip_sgd.py)
#   VENV               virtual environment (.venv)
#   OUT_DIR            checkpoints and curves (runs/<job name>); the same for every run of a job, so that it resumes
#   NPROC_PER_NODE     processes per node (the node's GPUs, or 1)
#   NETWORK_INTERFACE  interface for Gloo and NCCL, e.g. eth0 or ib0 (their own choice)
#   MASTER_PORT        port of the rendezvous on the first host (from the job id)
#   CONTAINER          an image for pyxis (srun --container-image), whose torchrun takes the place of VENV
#   CONTAINER_MOUNTS   folders beside the working folder, e.g. /imagenet:/imagenet:ro
#   MAX_RESTARTS       times that a job is requeued on a signal (100); ends one whose time limit is too short to train
#
# 120 s before the time limit, or on `scancel --batch --signal=USR1 <job>`, USR1 reaches this script, which passes it
# on through srun and torchrun: the workers save a checkpoint, exit with code 75 and the job is requeued; it resumes from
# there. They have 100 s for it, and do not interrupt a validation: where one takes longer than a minute, submit with
# --signal=B:USR1@300. Jobs of one name go on from each other: give another --job-name, or OUT_DIR, to another experiment.
# When a node fails, SLURM requeues the job, which resumes from its newest checkpoint:
# see --checkpoint-every and --checkpoint-every-steps. A job that fails by itself is not requeued. An OUT_DIR with a finished
# run that has no checkpoint is refused: name another, or start it by hand with --overwrite.
set -euo pipefail

# From the first line on, lest a USR1 that comes before training has started ends this script.
signalled=0
trap 'signalled=1' USR1

: "${SLURM_JOB_ID:?is not set: submit with sbatch, or run inside an allocation}"

require() { # <test> <path> <remedy>
  test "$1" "$2" || { printf 'error: got no %s in %s, expected it there; %s\n' "$2" "$PWD" "$3" >&2 && exit 2; }
}

script=${SCRIPT:-train/gossip_sgd.py}
torchrun=${VENV:-.venv}/bin/torchrun
require -f "$script" "submit from the top of the repository, or name another script in SCRIPT"
container=()
if [[ -n ${CONTAINER:-} ]]; then
  torchrun=torchrun
  container=(
    "--container-image=$CONTAINER" "--container-workdir=$PWD"
    "--container-mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
  )
else
  require -x "$torchrun" "make it with 'make venv', or name your virtual environment in VENV, or an image in CONTAINER"
fi

num_procs=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
num_restarts=${SLURM_RESTART_COUNT:-0}
out_dir=${OUT_DIR:-runs/${SLURM_JOB_NAME:-gossip}}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
master=${hosts%%$'\n'*}
# SLURM's name of a host need not be one that resolves: the address by which SLURM reaches it does.
node=$(scontrol --oneliner show node "$master")
[[ ! $node =~ \ NodeAddr=([^ ]+) ]] || master=${BASH_REMATCH[1]}
# Above the well-known ports, below Linux's ephemeral ones, and another for each of two jobs on one host.
port=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}

# What torchrun falls back to, without its warning; --num-threads sets the threads of a training process.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# So that the job's output is up to date, and whole when a job is killed.
export PYTHONUNBUFFERED=1
# Since SLURM 22.05 srun no longer takes the cores of a task from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
if [[ -n ${NETWORK_INTERFACE:-} ]]; then
  export GLOO_SOCKET_IFNAME=$NETWORK_INTERFACE NCCL_SOCKET_IFNAME=$NETWORK_INTERFACE
fi

# Less than the 120 s before the time limit; torchrun's default of 30 s is short for a large model on a slow disk.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}

# On each node. The first one serves the rendezvous: left to guess from its own name and addresses whether it is the
# host, torchrun finds none behind an alias, and many where a port is taken by another job, whose store they would join.
# The others may come up to 300 s before it: Python starts slowly from a cold network file system.
# shellcheck disable=SC2016
on_node='exec "$0" --rdzv-conf="is_host=$((SLURM_NODEID == 0)),read_timeout=300" "$@"'

# Where SLURM tracks processes by cgroup, srun's signals reach the task itself, torchrun, and not its children: torchrun
# passes them on, which without its option it would not do with USR1, but die of it and leave the workers behind. The
# option overrides TORCHELASTIC_SIGNALS_TO_HANDLE. A requeued job meets under an id of its own. When a node fails the
# workers of the others do so at once, but SLURM requeues only a job that is still there when it notices, by default
# after 300 s: hence the longer --wait.
command=(
  srun "--nodes=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --wait=600 ${container[@]+"${container[@]}"}
  bash -c "$on_node" "$torchrun" "--nnodes=$SLURM_JOB_NUM_NODES" "--nproc-per-node=$num_procs"
  --rdzv-backend=c10d "--rdzv-endpoint=$master:$port" "--rdzv-id=$SLURM_JOB_ID-$num_restarts"
  "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
  "$script" --out-dir "$out_dir" --resume auto "$@"
)

if [[ ${DRY_RUN:-0} != 0 ]]; then
  printf '%q ' "${command[@]}"
  printf '\n'
  exit 0
fi

"${command[@]}" &
step=$!
interrupted=1
trap 'signalled=1 interrupted=1; kill -USR1 "$step" 2>/dev/null || :' USR1
# A USR1 that came before there was a step: it has nothing to save, and a child that young may miss what is trapped here.
((!signalled)) || kill -TERM "$step" 2>/dev/null || :
# A trapped signal ends `wait` early: only a wait that no signal interrupted tells the status of the step.
while ((interrupted)); do
  interrupted=0
  status=0
  wait "$step" || status=$?
done

((signalled && status)) || exit "$status"

if ((num_restarts >= ${MAX_RESTARTS:-100})); then
  echo "job $SLURM_JOB_ID: stopped on USR1 after $num_restarts restarts, not requeued: see MAX_RESTARTS in launch.sh" >&2
  exit "$status"
fi
echo "job $SLURM_JOB_ID: stopped on USR1, requeueing"
if ! scontrol requeue "$SLURM_JOB_ID"; then
  echo "job $SLURM_JOB_ID: SLURM did not requeue it; submit it again with OUT_DIR=$out_dir, it resumes from there" >&2
  exit "$status"
fi
