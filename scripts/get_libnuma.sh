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
command=$(numa_command)

have_libnuma() {
  [ -n "$(find "$folder" -name libnuma.so.1 2>/dev/null)" ] ||
    "${PYTHON:-python3}" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null
}

if have_libnuma; then
  exit 0
elif install_silently "$command" >&2 && have_libnuma; then
  echo "installed: $command"
elif unpack_deb "$folder" libnuma1 libnuma >&2 && have_libnuma; then
  echo "unpacked libnuma in $folder, without root"
else
  exit 1
fi
