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
"$bin/vllm-duck" status "unix:$dir/duck0" "unix:$dir/duck1" "unix:$dir/duck2"
"$bin/python" examples/offline.py "$model"
