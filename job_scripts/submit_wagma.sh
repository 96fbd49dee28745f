#!/usr/bin/env bash
# WAGMA-SGD: GPUs average in small groups that do not wait for late members, and every tenth round all together.
# Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" wagma "$@"
