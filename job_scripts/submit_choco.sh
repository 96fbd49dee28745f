#!/usr/bin/env bash
# CHOCO-SGD: signs of what neighbours in a ring do not know yet, a bit per parameter.
# Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" choco "$@"
