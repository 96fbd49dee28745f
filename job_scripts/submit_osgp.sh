#!/usr/bin/env bash
# Overlap SGP: messages travel under forward and backward and arrive one step late. Environment: see submit_imagenet.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/submit_imagenet.sh" osgp "$@"
