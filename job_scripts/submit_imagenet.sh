#!/usr/bin/env bash
# ResNet-50 on ImageNet by one method, as in the papers: 90 epochs, 256 images per node and step. submit_<method>.sh
# call it.
#
#   DATA_DIR=/data/imagenet NUM_NODES=8 job_scripts/submit_imagenet.sh <recipe> [options of train/gossip_sgd.py ...]
#
# Environment: DATA_DIR, a folder with train/ and val/, and that of submit.sh; GPUS_PER_NODE divides 256.
set -euo pipefail

recipe=${1:?is missing: name a recipe, e.g. sgp; python -m gossip_modules.methods lists them}
shift
: "${DATA_DIR:?is not set: name the folder that holds train/ and val/}"

exec "$(dirname "${BASH_SOURCE[0]}")/submit.sh" "imagenet-$recipe" train/gossip_sgd.py "$recipe" \
  --preset imagenet-resnet50 --data-dir "$DATA_DIR" "$@"
