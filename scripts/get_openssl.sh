#!/usr/bin/env bash
# Brings OpenSSL 3's headers, which the native stream's TLS is built with, where they are
# missing: as get_nghttp2.sh does for nghttp2. Without them grpcio carries calls with TLS.
#
#   scripts/get_openssl.sh [FOLDER]        FOLDER defaults to build/openssl
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh

bring_headers openssl "${1:-build/openssl}" openssl/ssl.h libssl.so \
  "$(openssl_command)" "calls with TLS will go through grpcio" libssl-dev libssl3
