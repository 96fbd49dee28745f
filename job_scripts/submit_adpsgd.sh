#!/usr/bin/env bash
# AD-PSGD: pairs of GPUs average while both go on training, each at its own pace; fast ones take more of the steps.
# Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" adpsgd "$@"
