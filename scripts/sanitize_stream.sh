#!/usr/bin/env bash
# Builds the native stream with AddressSanitizer and UndefinedBehaviorSanitizer (or, with
# `thread` as the first argument, ThreadSanitizer) in a copy of the sources, and runs the
# tests of the wire against it, the fuzz suite with thousands of sessions. The kernel is
# the checkout's; scripts/sanitize_kernel.sh looks after that one. Further arguments go
# to pytest.
#
#   PYTHON=.venv/bin/python scripts/sanitize_stream.sh [address|thread] [PYTEST ARGS]
#   VLLM_DUCK_FUZZ_SESSIONS=100000 scripts/sanitize_stream.sh address -k fuzz
set -euo pipefail

cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python3}")
kind=address
case "${1:-}" in address | thread)
  kind=$1
  shift
  ;;
esac

if [ "$kind" = thread ]; then
  flags="-fsanitize=thread" library=libtsan.so
else
  flags="-fsanitize=address,undefined -fno-sanitize-recover=all" library=libasan.so
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -co --exclude-standard -- setup.py pyproject.toml README.md vllm_duck tests \
  examples | tar -c -T - --ignore-failed-read | tar -x -C "$copy"
for extension in executor/_kernel models/_host; do
  cp "vllm_duck/$extension.abi3.so" "$copy/vllm_duck/$extension.abi3.so"
done
cd "$copy"

# By hand, since setup.py would build all extensions; -O1 and -g: reports with lines.
include=$("$python" -c "import sysconfig; print(sysconfig.get_path('include'))")
csrc=vllm_duck/executor/csrc
cxx=${CXX:-g++}
# shellcheck disable=SC2086
"$cxx" -std=c++17 -O1 -g -fno-omit-frame-pointer -fPIC -shared -pthread $flags -w \
  -DPy_LIMITED_API=0x030B0000 -I$csrc -I$csrc/stream -I"$include" \
  $csrc/stream/*.cpp $csrc/crc32c.cpp -lnghttp2 -o vllm_duck/executor/_stream.abi3.so

# CPython itself leaks at exit. The C++ runtime must come right after the sanitizer's,
# which cannot intercept exceptions otherwise. PYTHONPATH: not the checkout's package.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" PYTHONPATH=$copy
export VLLM_DUCK_FUZZ_SESSIONS=${VLLM_DUCK_FUZZ_SESSIONS:-3000}
LD_PRELOAD="$("$cxx" -print-file-name=$library) $("$cxx" -print-file-name=libstdc++.so)" \
  "$python" -m pytest -p no:cacheprovider --capture=sys tests/executor/test_stream_fuzz.py \
  tests/executor/test_wire_matrix.py tests/executor/test_wire_faults.py \
  tests/executor/test_native_server.py tests/executor/test_native_sum.py \
  tests/executor/test_crc32c.py "$@"
