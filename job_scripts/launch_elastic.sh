#!/usr/bin/env bash
#SBATCH --job-name=gossip-elastic
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=30:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out
#
# Trains on nodes that come and go, with --elastic: each element of a job array is one node, so that SLURM takes each of
# them away, and queues it again, by itself, while the others train on. Arguments are the training script's:
#
#   sbatch --array=0-7 --gpus-per-node=8 job_scripts/launch_elastic.sh --recipe sgp --checkpoint-every 1
#   STORE=file:runs/gossip-elastic/store sbatch --array=8-9 job_scripts/launch_elastic.sh --min-workers 64   # 2 more
#   STORE=file:///shared/run1 sbatch --array=0-7 job_scripts/launch_elastic.sh --algorithm "DiLoCo(sync_every=100)"
#   DRY_RUN=1 job_scripts/launch_elastic.sh --recipe sgp    # inside an allocation: prints the commands and ends
#
# On each node `srun` starts restart.sh once for each worker: a worker that dies is started again, and ends nobody. The
# first element of the array also serves the membership, apart from its workers, and writes its address to
# <OUT_DIR>/store. It is started again when it dies; where the whole node is lost, with that element, on whichever node
# that gets. Until then the others train on without it. Submit from the top of the repository, or with --chdir. Environment:
#   SCRIPT             what to train with (train/gossip_sgd.py)
#   VENV               virtual environment (.venv)
#   OUT_DIR            checkpoints, curves and the address of the store (runs/<job name>); a folder that all nodes see
#   NPROC_PER_NODE     workers per node (the node's GPUs, or 1)
#   STORE              a store that runs already, host:port or file:path: then this array serves none. Or the address of a
#                      mailbox, with "://": then nothing is served, and nodes need no connection with each other
#   NETWORK_INTERFACE  interface for Gloo, e.g. eth0 or ib0 (its own choice)
#   MAX_RESTARTS       times that a node is requeued on a signal (100)
# and those of restart.sh: MAX_FAILURES, STEADY_SECONDS, MAX_PAUSE, RETRY_SECONDS, GRACE_SECONDS.
#
# The run begins when all workers of the array are there, or --min-workers of them; those beyond --max-workers wait for
# a place. 120 s before its time limit, or on `scancel --batch --signal=USR1 <job>_<element>`, an element's workers leave
# the run, the first worker of all after a checkpoint, and the element is requeued. One whose worker gives up ends when
# its other workers do, the first element when the other elements do, and is not requeued. An OUT_DIR with a finished
# run ends all of them with status 0.
set -euo pipefail

# From the first line on, lest a USR1 that comes before training has started ends this script.
signalled=0
trap 'signalled=1' USR1

: "${SLURM_JOB_ID:?is not set: submit with sbatch, or run inside an allocation}"
if ((${SLURM_JOB_NUM_NODES:-1} > 1)); then
  echo "error: got $SLURM_JOB_NUM_NODES nodes, expected 1 for each element of an array, which SLURM can requeue alone;" \
    "submit with --nodes=1 --array=0-$((SLURM_JOB_NUM_NODES - 1))" >&2
  exit 2
fi

require() { # <test> <path> <remedy>
  test "$1" "$2" || { printf 'error: got no %s in %s, expected it there; %s\n' "$2" "$PWD" "$3" >&2 && exit 2; }
}

script=${SCRIPT:-train/gossip_sgd.py}
python=${VENV:-.venv}/bin/python
require -f "$script" "submit from the top of the repository, or name another script in SCRIPT"
require -x "$python" "make it with 'make venv', or name your virtual environment in VENV"
require -x job_scripts/restart.sh "submit from the top of the repository"

num_workers=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
num_restarts=${SLURM_RESTART_COUNT:-0}
out_dir=${OUT_DIR:-runs/${SLURM_JOB_NAME:-gossip-elastic}}
# The number of an array is also that of one of its elements: only so is a single one meant.
element=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
element=${element:-$SLURM_JOB_ID}

serve=()
if [[ -z ${STORE:-} && ${SLURM_ARRAY_TASK_ID:-0} == "${SLURM_ARRAY_TASK_MIN:-0}" ]]; then
  # SLURM's name of a host need not be one that resolves: the address by which SLURM reaches it does.
  host=${SLURMD_NODENAME:-$(hostname)}
  node=$(scontrol --oneliner show node "$host")
  [[ ! $node =~ \ NodeAddr=([^ ]+) ]] || host=${BASH_REMATCH[1]}
  serve=(
    job_scripts/restart.sh "$python" -m gossip_modules.membership.serve
    --port 0 --host "$host" --address-file "$out_dir/store"
  )
fi

# --num-threads sets the threads of a training process.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# So that the job's output is up to date, and whole when a job is killed.
export PYTHONUNBUFFERED=1
if [[ -n ${NETWORK_INTERFACE:-} ]]; then
  export GLOO_SOCKET_IFNAME=$NETWORK_INTERFACE
fi

# A worker that gives up ends neither the step nor, as without --wait=0 some clusters would, those beside it later.
cpus=$((${SLURM_CPUS_PER_TASK:-1} / num_workers))
resume=(--resume auto)
[[ ${STORE:-} != *://* ]] || resume=()  # the run in a mailbox goes on by itself
command=(
  srun --nodes=1 "--ntasks=$num_workers" "--ntasks-per-node=$num_workers" "--cpus-per-task=$((cpus > 0 ? cpus : 1))"
  --kill-on-bad-exit=0 --wait=0
  job_scripts/restart.sh "$python" "$script" --elastic --store "${STORE:-file:$out_dir/store}"
  --min-workers "$((${SLURM_ARRAY_TASK_COUNT:-1} * num_workers))" --out-dir "$out_dir" "${resume[@]}" "$@"
)

if [[ ${DRY_RUN:-0} != 0 ]]; then
  if ((${#serve[@]})); then
    printf '%q ' "${serve[@]}"
    printf '&\n'
  fi
  printf '%q ' "${command[@]}"
  printf '\n'
  exit 0
fi

if ((${#serve[@]})); then
  "${serve[@]}" &
  server=$!
  trap 'kill "$server" 2>/dev/null || :' EXIT
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

# The others may go on without the workers of this node, and who comes to them needs the store.
if ((status && !signalled && ${#serve[@]})) && [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
  echo "job $element: its workers have given up (status $status); it serves the membership until the others end" >&2
  while ((!signalled)) && squeue --noheader --array --format=%i --jobs="$SLURM_ARRAY_JOB_ID" | grep -qvx "$element"; do
    sleep 5 &
    wait "$!" || :
  done
fi
((signalled && status)) || exit "$status"

if ((num_restarts >= ${MAX_RESTARTS:-100})); then
  echo "job $element: stopped on USR1 after $num_restarts restarts, not requeued: see MAX_RESTARTS" >&2
  exit "$status"
fi
echo "job $element: stopped on USR1, requeueing"
if ! scontrol requeue "$element"; then
  echo "job $element: SLURM did not requeue it; submit it again with OUT_DIR=$out_dir, it resumes from there" >&2
  exit "$status"
fi
