#!/usr/bin/env bash
# Brings OpenSSL 3's headers, which the native stream's TLS is built with, where they are
# missing: as get_nghttp2.sh does for nghttp2. Without them grpcio carries calls with TLS.
#
#   scripts/get_openssl.sh [FOLDER]        FOLDER defaults to build/openssl
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh

folder=${1:-build/openssl}
command=$(openssl_command)

have() {
  [ -n "$(find "$folder" -name libssl.so 2>/dev/null)" ] ||
    "${CXX:-g++}" -fsyntax-only -x c++ - 2>/dev/null <<<'#include <openssl/ssl.h>'
}

if have; then
  echo "OpenSSL's headers are there"
elif ! bring openssl "$folder" "$command" libssl-dev libssl3; then
  echo "no headers of OpenSSL to be had, so calls with TLS will go through grpcio, which" \
    "takes ten times the CPU; to mend it: $command && make -B venv"
fi
