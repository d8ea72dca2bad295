#!/usr/bin/env bash
# Builds kernel and native stream with AddressSanitizer and UndefinedBehaviorSanitizer
# (or, with `thread` as the first argument, ThreadSanitizer) in a copy of the sources,
# and runs the tests of the wire against them, the fuzz suite with thousands of
# sessions. Further arguments go to pytest.
#
#   PYTHON=.venv/bin/python scripts/sanitize_stream.sh [address|thread] [PYTEST ARGS]
#   VLLM_DUCK_FUZZ_SESSIONS=100000 scripts/sanitize_stream.sh address -k fuzz
set -euo pipefail

cd "$(dirname "$0")/.."
export VLLM_DUCK_FUZZ_SESSIONS=${VLLM_DUCK_FUZZ_SESSIONS:-3000}
SANITIZED_TESTS="tests/executor/test_stream_fuzz.py tests/executor/test_wire_matrix.py
  tests/executor/test_wire_faults.py tests/executor/test_native_server.py
  tests/executor/test_native_sum.py tests/executor/test_crc32c.py" \
  exec scripts/sanitize_kernel.sh "$@"
