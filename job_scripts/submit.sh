#!/usr/bin/env bash
# Submits launch.sh. submit_imagenet.sh, submit_transformer.sh and submit_language_model.sh call it:
#
#   job_scripts/submit.sh <job name> <training script> <recipe> [options of the training script ...]
#
# Environment: NUM_NODES (4), GPUS_PER_NODE (8) and that of launch.sh, which sbatch hands on. SBATCH_PARTITION,
# SBATCH_ACCOUNT, SBATCH_TIMELIMIT and the like are sbatch's own. DRY_RUN=1 prints the command and submits nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1:?is missing: the name of the job} script=${2:?is missing: the training script}
recipe=${3:?is missing: name a recipe, e.g. sgp; python -m gossip_modules.methods lists them}
shift 3
num_gpus=${GPUS_PER_NODE:-8}

# AllReduce knows no nodes, and asynchronous GPUs go their own ways; otherwise those of a node average their gradients and
# speak as one.
[[ $recipe =~ ^(ar|adpsgd|wagma|dpwa)$ ]] || set -- --nprocs-per-node "$num_gpus" "$@"

command=(
  env "SCRIPT=$script" sbatch "--job-name=$name" "--nodes=${NUM_NODES:-4}" "--gpus-per-node=$num_gpus"
  job_scripts/launch.sh --recipe "$recipe" "$@"
)
if [[ ${DRY_RUN:-0} != 0 ]]; then
  printf '%q ' "${command[@]}"
  printf '\n'
  exit 0
fi
exec "${command[@]}"
