#!/usr/bin/env bash
# Builds one extension with AddressSanitizer and UndefinedBehaviorSanitizer, or with
# ThreadSanitizer, in a copy of the sources, and runs its tests against it. The other
# extensions are the checkout's, so build those first. Further arguments go to pytest.
#
#   scripts/sanitize.sh kernel|stream [address|thread] [PYTEST ARGS]
#   PYTHON=.venv/bin/python scripts/sanitize.sh kernel
#   scripts/sanitize.sh stream --fuzz 200000           `python -m testing.fuzz` instead
#
# The kernel takes about ten minutes to build on two cores, the stream one.
set -euo pipefail

usage() {
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

extension=${1:-}
case "$extension" in kernel | stream) shift ;; *) usage ;; esac
sanitizer=address
case "${1:-}" in
address | thread)
  sanitizer=$1
  shift
  ;;
"" | -*) ;;
*) usage ;;
esac
case $sanitizer in
address) flags="-fsanitize=address,undefined -fno-sanitize-recover=all" library=libasan.so ;;
thread) flags="-fsanitize=thread" library=libtsan.so ;;
esac

fuzz_cases=
if [ "${1:-}" = --fuzz ]; then
  fuzz_cases=${2:?"expected --fuzz NUMBER_OF_CASES"}
  shift 2
fi

cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python3}")
[[ $python = /* ]] || python=$PWD/$python
cxx=${CXX:-g++}
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -co --exclude-standard -- setup.py pyproject.toml README.md vllm_duck tests \
  testing examples models | tar -c -T - --ignore-failed-read | tar -x -C "$copy"
for built in vllm_duck/executor/_kernel vllm_duck/executor/_stream \
  vllm_duck/models/cpu/_host; do
  cp "$built.abi3.so" "$copy/$built.abi3.so"
done
# Its path has no blanks, which an option of the sanitizer cannot have.
cp scripts/tsan.supp "$copy"
cd "$copy"

# -O1 and -g1: reports with lines; tracking variables would take most of an hour.
VLLM_DUCK_EXTENSION=_$extension VLLM_DUCK_LDFLAGS=$flags \
  VLLM_DUCK_CXXFLAGS="$flags -O1 -g1 -fno-omit-frame-pointer" \
  "$python" setup.py -q build_ext --inplace

case $extension in
kernel) tests="kernel kernel_shards kernel_errors requantize checksums codec crc32c" ;;
stream)
  tests="stream_fuzz matrix cuts faults stock_server server"
  # Not descriptors: the sanitizer opens pipes, and takes it for a finding if it cannot.
  tests="$tests stop sum identity odd_calls names tls renewed_files strangers shares"
  ;;
esac

# CPython itself leaks at exit. The C++ runtime must come right after the sanitizer's,
# which cannot intercept exceptions otherwise. PYTHONPATH: not the checkout's package.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS="suppressions=$copy/tsan.supp ${TSAN_OPTIONS:-}" PYTHONPATH=$copy
export VLLM_DUCK_FUZZ_SESSIONS=${VLLM_DUCK_FUZZ_SESSIONS:-3000}
# ThreadSanitizer does not survive a fork beside grpcio's threads, as these tests need.
skipped=
[ "$sanitizer" = address ] || skipped="--deselect=tests/executor/wire/test_faults.py::test_a_duck_that_is_killed_in_mid_call_is_unavailable_at_once --deselect=tests/executor/wire/test_tls.py --deselect=tests/executor/wire/test_renewed_files.py"
preload="$("$cxx" -print-file-name=$library) $("$cxx" -print-file-name=libstdc++.so)"
if [ -n "$fuzz_cases" ]; then
  case $extension in
  kernel) targets="request reply" ;;
  stream) targets="session_of_native session_of_grpcio session_of_describe answers" ;;
  esac
  # shellcheck disable=SC2086
  LD_PRELOAD=$preload "$python" -m testing.fuzz --cases "$fuzz_cases" --only $targets "$@"
  exit
fi
# shellcheck disable=SC2046,SC2086
LD_PRELOAD=$preload \
  "$python" -m pytest -p no:cacheprovider --capture=sys \
  $skipped $(printf 'tests/executor/*/test_%s.py ' $tests) "$@"
