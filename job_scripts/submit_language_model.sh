#!/usr/bin/env bash
# GPT-2 on text files by one method: eight nodes of one GPU, half a million tokens per step, AdamW with 700 steps of
# warm-up.
#
#   DATA_DIR=/data/text job_scripts/submit_language_model.sh <recipe> [options of train/language_model.py ...]
#   ... submit_language_model.sh sgp --files '*.txt' --steps-per-epoch 5000
#
# Environment: DATA_DIR, a folder of text files, see --data-dir; MODEL, gpt2, gpt2-medium or gpt2-large (gpt2); NUM_NODES
# (8), GPUS_PER_NODE (1) and that of submit.sh.
set -euo pipefail

recipe=${1:?is missing: name a recipe, e.g. sgp; python -m gossip_modules.methods lists them}
shift
: "${DATA_DIR:?is not set: name the folder that holds the text files}"
model=${MODEL:-gpt2}
[[ $model =~ ^gpt2(-medium|-large)?$ ]] ||
  { echo "error: got MODEL=$model, expected gpt2, gpt2-medium or gpt2-large" >&2 && exit 2; }

NUM_NODES=${NUM_NODES:-8} GPUS_PER_NODE=${GPUS_PER_NODE:-1} exec "$(dirname "${BASH_SOURCE[0]}")/submit.sh" \
  "$model-$recipe" train/language_model.py "$recipe" --preset "$model" --data-dir "$DATA_DIR" "$@"
