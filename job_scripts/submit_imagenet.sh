#!/usr/bin/env bash
# ResNet-50 on ImageNet by one method: 90 epochs, 256 images per node and step on 8 GPUs. submit_<method>.sh call it.
#
#   DATA_DIR=/data/imagenet NUM_NODES=8 job_scripts/submit_imagenet.sh <recipe> [options of train/gossip_sgd.py ...]
#
# Environment: DATA_DIR (a folder with train/ and val/), NUM_NODES (4), GPUS_PER_NODE (8) and that of launch.sh, which
# sbatch hands on. SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT and the like are sbatch's own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

recipe=${1:?is missing: name a recipe of train/recipes.py, e.g. sgp}
shift
: "${DATA_DIR:?is not set: name the folder that holds train/ and val/}"
num_gpus=${GPUS_PER_NODE:-8}

# AllReduce knows no nodes, and asynchronous GPUs go their own ways; otherwise those of a node average their gradients and
# speak as one.
[[ $recipe =~ ^(ar|adpsgd|wagma|dpwa)$ ]] || set -- --nprocs-per-node "$num_gpus" "$@"

exec sbatch --job-name="imagenet-$recipe" --nodes="${NUM_NODES:-4}" --gpus-per-node="$num_gpus" job_scripts/launch.sh \
  --recipe "$recipe" --dataset imagefolder --data-dir "$DATA_DIR" --model resnet50 --epochs 90 \
  --batch-size 32 --lr 0.1 --warmup-epochs 5 --milestones 30 60 80 --weight-decay 1e-4 --num-workers 4 \
  --checkpoint-every 1 "$@"
