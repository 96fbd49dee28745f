#!/usr/bin/env bash
# dpwa: each GPU pulls the model of another over TCP and goes half the way towards it; nobody waits for anybody.
# Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" dpwa "$@"
