#!/usr/bin/env bash
#
# Runs a command, and runs it again when it fails, after 1, 2, 4, ... seconds:
#
#   job_scripts/restart.sh .venv/bin/python -m train.gossip_sgd --elastic --min-workers 4 --resume auto
#   job_scripts/restart.sh .venv/bin/python -m gossip_modules.membership.serve
#
# It ends with the status of the command when that has succeeded (0) or was called wrongly (2), after MAX_FAILURES in a
# row, and after a signal that tells it to stop: USR1, TERM and INT are handed to the command, which is killed where it
# has not ended after GRACE_SECONDS. A command that ends with 75 without such a signal is not needed, or cannot begin,
# at present: it is run again after RETRY_SECONDS, as often as it likes. Environment:
#   MAX_FAILURES    failures in a row after which it gives up (10)
#   STEADY_SECONDS  a command that has run for so long begins a new row (300)
#   MAX_PAUSE       the longest pause after a failure, in seconds (60)
#   RETRY_SECONDS   the pause after status 75 (15)
#   GRACE_SECONDS   that a command has to end after a signal (100)
set -euo pipefail

if (($# == 0)); then
  echo "error: got no command, expected one to run: job_scripts/restart.sh <command> [argument ...]" >&2
  exit 2
fi

child='' signal='' status=75 failures=0
stop() { # <signal>
  signal=$1
  [[ -z $child ]] || kill "-$signal" "$child" 2>/dev/null || :
}
trap 'stop USR1' USR1
trap 'stop TERM' TERM INT  # what runs in the background ignores INT

while [[ -z $signal ]]; do
  start=$SECONDS
  "$@" &
  child=$!
  [[ -z $signal ]] || stop "$signal"
  status=0
  wait "$child" || status=$?
  if [[ -n $signal ]]; then  # it has ended the wait
    last=$((SECONDS + ${GRACE_SECONDS:-100}))
    while kill -0 "$child" 2>/dev/null; do
      ((SECONDS < last)) || kill -KILL "$child" 2>/dev/null || :
      sleep 0.1 || :
    done
    status=0
    wait "$child" || status=$?
  fi
  child=''
  [[ -z $signal && $status != 0 && $status != 2 ]] || break

  if ((status == 75)); then
    pause=${RETRY_SECONDS:-15}
  else
    ((SECONDS - start < ${STEADY_SECONDS:-300})) || failures=0
    failures=$((failures + 1))
    if ((failures >= ${MAX_FAILURES:-10})); then
      echo "restart.sh: status $status, $failures failures in a row: given up: $*" >&2
      break
    fi
    pause=${MAX_PAUSE:-60}
    ((failures > 16 || 1 << (failures - 1) >= pause)) || pause=$((1 << (failures - 1)))
  fi
  echo "restart.sh: status $status, again in $pause s: $*" >&2
  sleep "$pause" &
  sleeper=$!
  { [[ -z $signal ]] && wait "$sleeper"; } || kill "$sleeper" 2>/dev/null || :
done

exit "$status"
