#!/usr/bin/env bash
# Brings libnuma.so.1, which vLLM for CPU loads and its wheel lacks, where it is missing:
# installed as root or with passwordless sudo, or else unpacked in FOLDER, from where
# scripts/setup_venv.sh puts it into the environment. Exits with 1 if it cannot be had.
#
#   scripts/get_libnuma.sh [FOLDER]        FOLDER defaults to build/libnuma
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh

folder=${1:-build/libnuma}

have() {
  [ -n "$(find "$folder" -name libnuma.so.1 2>/dev/null)" ] ||
    "${PYTHON:-python3}" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null
}

have || bring libnuma "$folder" "$(numa_command)" libnuma1 libnuma
