#!/usr/bin/env bash
# Stochastic Gradient Push: each node sends to one peer of an exponential graph. Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" sgp "$@"
