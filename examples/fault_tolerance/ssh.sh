#!/usr/bin/env bash
# Plain ssh: one supervisor on each host; the first host has the rendezvous.  A supervisor that
# cannot be reached is started again until the run has ended.
#
#   CHECKPOINTS=/shared/gpt bash examples/fault_tolerance/ssh.sh node0 node1 node2 node3
set -euo pipefail

[ $# -gt 0 ] || { echo "usage: $0 HOST ..." >&2; exit 2; }
FOLDER=$PWD
LOST=255 # exit status of ssh when the connection fails

start() {
    local host=$1 code
    while true; do
        code=0
        ssh -o ServerAliveInterval=15 "$host" "cd '$FOLDER' && CHECKPOINTS='${CHECKPOINTS:-checkpoints/gpt}' \
            NODES='$NODES' ENDPOINT='$ENDPOINT' RUN_ID='$RUN_ID' \
            NODE_NAME='$host' bash examples/fault_tolerance/train.sh" || code=$?
        [ "$code" -eq "$LOST" ] || return "$code"
        sleep 10
    done
}

NODES=${NODES:-$#}
ENDPOINT="$1:29400"
RUN_ID="gpt-$(date +%s)"
PIDS=()
for host in "$@"; do
    start "$host" &
    PIDS+=($!)
done
CODE=0
for pid in "${PIDS[@]}"; do
    wait "$pid" || CODE=$?
done
exit "$CODE"
