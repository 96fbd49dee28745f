#!/usr/bin/env bash
# A Transformer on WMT'16 English to German by one method, as in the paper of SGP: eight nodes of one GPU, 3,500 tokens
# per GPU and micro-batch, Adam with 4,000 steps of warm-up; big in batches of sixteen of those, 400,000 tokens.
#
#   DATA_DIR=/data/wmt16_en_de job_scripts/submit_transformer.sh <recipe> [options of train/translate.py ...]
#   ... submit_transformer.sh sgp --accumulation-steps 1    # "25k-token batch"
#
# Environment: DATA_DIR, a folder with train*.en and train*.de, see --train-prefix; MODEL, base or big (big); NUM_NODES
# (8), GPUS_PER_NODE (1) and that of submit.sh.
set -euo pipefail

recipe=${1:?is missing: name a recipe, e.g. sgp; python -m gossip_modules.methods lists them}
shift
: "${DATA_DIR:?is not set: name the folder that holds the parallel text, train*.en and train*.de}"
model=${MODEL:-big}
[[ $model =~ ^(base|big)$ ]] || { echo "error: got MODEL=$model, expected base or big" >&2 && exit 2; }

NUM_NODES=${NUM_NODES:-8} GPUS_PER_NODE=${GPUS_PER_NODE:-1} exec "$(dirname "${BASH_SOURCE[0]}")/submit.sh" \
  "transformer-$model-$recipe" train/translate.py "$recipe" --preset "wmt16-$model" --data-dir "$DATA_DIR" "$@"
