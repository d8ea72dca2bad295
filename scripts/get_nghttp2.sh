#!/usr/bin/env bash
# Brings nghttp2's headers, which the native stream is built with, where they are missing:
# installed as root or with passwordless sudo, or else unpacked in FOLDER, where setup.py
# looks. Without them grpcio carries the calls, so the exit code is 0 in any case.
#
#   scripts/get_nghttp2.sh [FOLDER]        FOLDER defaults to build/nghttp2
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh

bring_headers nghttp2 "${1:-build/nghttp2}" nghttp2/nghttp2.h libnghttp2.so \
  "$(nghttp2_command)" "ducks will be called through grpcio" libnghttp2-dev libnghttp2-
