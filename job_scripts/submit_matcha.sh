#!/usr/bin/env bash
# MATCHA: at each step about half of the links of a ring of nodes, each matching by its own coin.
# Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" matcha "$@"
