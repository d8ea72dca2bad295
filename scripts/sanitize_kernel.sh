#!/usr/bin/env bash
# Builds the kernel with AddressSanitizer and UndefinedBehaviorSanitizer (or, with
# `thread` as the first argument, ThreadSanitizer) in a copy of the sources, and runs
# the kernel's tests against it. Further arguments go to pytest.
#
#   PYTHON=.venv/bin/python scripts/sanitize_kernel.sh [address|thread] [PYTEST ARGS]
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

tests=${SANITIZED_TESTS:-tests/executor/test_kernel.py tests/executor/test_kernel_errors.py
  tests/executor/test_requantize.py tests/executor/test_checksums.py}

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -co --exclude-standard -- setup.py pyproject.toml README.md vllm_duck tests |
  tar -c -T - --ignore-failed-read | tar -x -C "$copy"
cd "$copy"

# -O1 and -g1: reports with lines; tracking variables would take most of an hour.
export VLLM_DUCK_CXXFLAGS="$flags -O1 -g1 -fno-omit-frame-pointer"
export VLLM_DUCK_LDFLAGS="$flags"
"$python" setup.py -q build_ext --inplace

# CPython itself leaks at exit. The C++ runtime must come right after the sanitizer's,
# which cannot intercept exceptions otherwise.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}"
cxx=${CXX:-g++}
LD_PRELOAD="$("$cxx" -print-file-name=$library) $("$cxx" -print-file-name=libstdc++.so)" \
  "$python" -m pytest -p no:cacheprovider $tests "$@"
