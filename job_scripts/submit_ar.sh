#!/usr/bin/env bash
# AllReduce SGD, the exact baseline: DistributedDataParallel over all GPUs. Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" ar "$@"
