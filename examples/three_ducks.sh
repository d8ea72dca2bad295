#!/usr/bin/env bash
# Three ducks by hand, of different sizes, and a host that uses them.
#
#   examples/three_ducks.sh [MODEL]
#
# On real machines each `vllm-duck serve` runs on its own, with --listen HOST:PORT and
# a token or TLS; here all three are on this machine, on unix sockets.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${1:-models/tiny-v32}
bin=${BIN:-.venv/bin}
dir=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$dir"' EXIT

# The first machine has twice the memory of the others.
"$bin/vllm-duck" plan "$model" --weights 2,1,1 >"$dir/plan.json"

for index in 0 1 2; do
    "$bin/vllm-duck" serve "$model" --plan "$dir/plan.json" --index "$index" \
        --listen "unix:$dir/duck$index" --threads 1 &
done

export VLLM_DUCK_ENDPOINTS=unix:$dir/duck0,unix:$dir/duck1,unix:$dir/duck2
# A duck opens its socket when it has loaded its shard.
for index in 0 1 2; do
    for _ in $(seq 300); do
        [ -S "$dir/duck$index" ] && break
        sleep 0.2
    done
done
"$bin/vllm-duck" status
"$bin/python" examples/offline.py "$model"
