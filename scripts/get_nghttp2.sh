#!/usr/bin/env bash
# Brings nghttp2's headers, which the native stream is built with, where they are missing:
# installed as root or with passwordless sudo, or else unpacked in FOLDER, where setup.py
# looks. Without them grpcio carries the calls, so the exit code is 0 in any case.
#
#   scripts/get_nghttp2.sh [FOLDER]        FOLDER defaults to build/nghttp2
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh

folder=${1:-build/nghttp2}
command=$(nghttp2_command)

have() {
  [ -n "$(find "$folder" -name libnghttp2.so 2>/dev/null)" ] ||
    "${CXX:-g++}" -fsyntax-only -x c++ - 2>/dev/null <<<'#include <nghttp2/nghttp2.h>'
}

if have; then
  echo "nghttp2's headers are there"
elif ! bring nghttp2 "$folder" "$command" libnghttp2-dev libnghttp2-; then
  echo "no headers of nghttp2 to be had, so ducks will be called through grpcio, which" \
    "takes ten times the CPU; to mend it: $command && make -B venv"
fi
