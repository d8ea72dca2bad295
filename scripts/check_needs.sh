#!/usr/bin/env bash
# Names everything that set-up needs and this machine lacks, each with the command that
# mends it, and then exits with 1. Takes a second, where set-up takes minutes.
#
#   scripts/check_needs.sh [VENV]          VENV defaults to .venv
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh

venv=${1:-.venv}
python=${PYTHON:-python3}
compiler=${CXX:-g++}
# Measured: the environment takes 3.1 GB, pip's downloads 0.6 GB and its cache of them as
# much, compiling 0.9 GB of memory and the demo 1.9 GB.
venv_mb=5000
temp_mb=1000
memory_mb=3000
num_missing=0

main() {
  check_python
  check_compiler
  check_disk
  check_memory
  [ "$num_missing" = 0 ] ||
    { echo "Mend this first, then run the same command again." >&2; exit 1; }
}

# missing WHAT REMEDY
missing() {
  [ "$num_missing" != 0 ] || echo "Set-up cannot start:" >&2
  num_missing=$((num_missing + 1))
  printf '  %s\n      -> %s\n' "$1" "$2" >&2
}

check_python() {
  local version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
  case $version in
    3.11 | 3.12 | 3.13) check_python_parts "$version" ;;
    *) missing "Python 3.11, 3.12 or 3.13 (${python} is ${version:-not there})" \
      "$(other_python)" ;;
  esac
}

other_python() {
  local name
  for name in python3.13 python3.12 python3.11; do
    "$name" -c "" 2>/dev/null && { echo "PYTHON=$name make ..."; return; }
  done
  install_command "python3 python3-venv python3-dev" \
    "python3.12 python3.12-devel" "python312 python312-devel" python python3-dev
}

check_python_parts() {
  local apt=python$1 rpm=python$1 suse=python${1/./}
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    missing "Python's venv with ensurepip" \
      "$(install_command "$apt-venv" "$rpm" "$suse" python python3)"
  "$python" - <<'PY' || missing "Python's headers (Python.h)" \
    "$(install_command "$apt-dev" "$rpm-devel" "$suse-devel" python python3-dev)"
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())
PY
  scripts/get_libnuma.sh 2>/dev/null ||
    missing "libnuma.so.1, which vLLM for CPU loads" "$(numa_command)"
}

check_compiler() {
  local major
  # Clang says 4 here, and builds it too.
  major=$("$compiler" -E -P -x c++ - <<<__GNUC__ 2>/dev/null)
  [ "${major:-0}" -ge 11 ] || "$compiler" --version 2>/dev/null | grep -q clang ||
    missing "g++ 11 or later ($compiler is ${major:-not there}; CXX names another)" \
      "$(install_command g++ gcc-c++ gcc-c++ gcc g++)"
}

check_disk() {
  local temp=${TMPDIR:-/tmp} folder=$venv need_mb=$venv_mb
  [ ! -e "$venv" ] || need_mb=$((venv_mb - $(du -sm "$venv" | cut -f1)))
  until [ -e "$folder" ]; do folder=$(dirname "$folder"); done
  check_free "$folder" "$need_mb" "free some, or VENV=/another/disk/venv make ..."
  check_free "$temp" "$temp_mb" "free some, or TMPDIR=/var/tmp make ..."
}

# check_free FOLDER MB REMEDY
check_free() {
  local free_mb
  free_mb=$(df -Pm "$1" | awk 'NR == 2 { print $4 }')
  [ "$free_mb" -ge "$2" ] ||
    missing "$2 MB of disk for $1 ($free_mb MB are free)" "$3"
}

check_memory() {
  local free_mb
  free_mb=$(awk '/^(MemAvailable|SwapFree):/ { kb += $2 } END { print int(kb / 1024) }' \
    /proc/meminfo)
  [ "$free_mb" -ge "$memory_mb" ] ||
    missing "$memory_mb MB of memory ($free_mb MB are free)" \
      "end other programs, or add swap (man swapon)"
}

main
