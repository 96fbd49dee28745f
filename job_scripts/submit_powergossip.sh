#!/usr/bin/env bash
# PowerGossip: rank-one estimates of the differences between neighbours in a ring. Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" powergossip "$@"
