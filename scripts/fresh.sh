#!/usr/bin/env bash
# Both README commands on a machine that has nothing: a minimal Debian with Python, make,
# g++ and git, made by debootstrap; in it an ordinary user with a clean clone of HEAD.
#
#   make fresh                      all three machines, as root
#   make fresh FRESH=absent         one of them, or several: FRESH="absent present"
#   make fresh FRESH_TESTS=0        up to the demo's text everywhere
#
#   absent       neither nghttp2's headers nor libnuma, but Debian has them: unpacked
#                without root; the native stream, and all of `make check test`
#   unreachable  no headers, and none to be had: a demo through grpcio
#   present      both are installed: a demo through the native stream
#
# The machine is a folder of build/fresh; mounts and processes are in namespaces of its
# own, which end with it. The last line is the verdict, and the exit code is its.
set -euo pipefail
cd "$(dirname "$0")/.."

variants=${FRESH:-absent unreachable present}
export FRESH_TESTS=${FRESH_TESTS:-1}
work=$PWD/build/fresh
packages=python3,python3-venv,python3-dev,make,g++,git,ca-certificates
verdict="" failed=0 child=""

main() {
  [ "$(id -u)" = 0 ] ||
    { echo "a Debian in a folder needs root: sudo make fresh" >&2; exit 1; }
  [ -z "$(git status --porcelain)" ] || echo "fresh: what is not committed is not tried"
  mkdir -p "$work"
  exec 9>"$work/lock"
  flock -n 9 || { echo "fresh: another run is using $work" >&2; exit 1; }
  # Where packages are is asked of apt, which knows it once it has its lists.
  [ -n "$(mirror)" ] || apt-get update -qq
  make_base
  trap 'rm -rf "$work"/machine-*' EXIT
  trap 'kill -KILL "$child" 2>/dev/null; exit 130' INT TERM
  for variant in $variants; do try "$variant"; done
  echo
  [ "$failed" = 0 ] && echo "fresh: PASSED in $SECONDS s:$verdict" && return
  echo "fresh: FAILED after $SECONDS s:$verdict"
  exit 1
}

# What all variants begin with; kept for the next time.
make_base() {
  [ ! -e "$work/base" ] || return 0
  command -v debootstrap >/dev/null ||
    { apt-get update && apt-get install -y debootstrap; } >/dev/null
  say "minimal Debian (a minute)"
  rm -rf "$work/base.partial"
  debootstrap --variant=minbase --include="$packages" "$(codename)" \
    "$work/base.partial" "$(mirror)" >"$work/debootstrap.log" ||
    { tail -n 20 "$work/debootstrap.log" >&2; exit 1; }
  mv "$work/base.partial" "$work/base"
}

codename() { . /etc/os-release && echo "$VERSION_CODENAME"; }

# This machine's own.
mirror() { apt-get indextargets --format '$(REPO_URI)' "Codename: $(codename)" | head -n 1; }

try() {
  local variant=$1 start_s=$SECONDS result=passed
  say "$variant"
  rm -rf "$work/machine-$variant"
  cp -a "$work/base" "$work/machine-$variant"
  unshare --mount --pid --ipc --fork --kill-child --propagation private \
    scripts/fresh_machine.sh "$work/machine-$variant" "$variant" &
  child=$!
  wait "$child" || { result=FAILED; failed=1; }
  # Out here none of its mounts is seen, so that only the folder goes; it takes a while.
  rm -rf "$work/machine-$variant" &
  verdict+=" $variant $result ($((SECONDS - start_s)) s)"
}

say() { printf '\n#### fresh: %s\n' "$*"; }

main
