#!/usr/bin/env bash
# D-PSGD: nodes average pairwise on a bipartite exponential graph. Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" dpsgd "$@"
