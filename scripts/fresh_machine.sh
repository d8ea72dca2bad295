#!/usr/bin/env bash
# One machine of scripts/fresh.sh, which starts this as root in namespaces for mounts and
# processes: equips the folder ROOT like this machine, and runs the README in it.
#
#   scripts/fresh_machine.sh ROOT absent|unreachable|present
set -euo pipefail
cd "$(dirname "$0")/.."

root=$1
variant=$2
user=newcomer
home=/home/$user
clone=$home/vllm_duck

main() {
  mount_system
  copy_network_settings
  "prepare_$variant"
  make_user
  copy_pip_settings

  as_user make demo | tee "$root/tmp/demo.txt"
  check_demo
  as_user make --question .venv/.ready || fail "a second make would set up again"
  if [ "$variant" = absent ] && [ "$FRESH_TESTS" = 1 ]; then
    as_user make check test
  fi
}

fail() { echo "fresh: $variant: $*" >&2; exit 1; }

mount_system() {
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
}

# Names, certificates, where Debian's packages are, and through which proxy.
copy_network_settings() {
  local file
  for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt; do
    show "$file" "$file"
  done
  apt-config dump | grep -E '^Acquire::(http|https|Retries|Check-)' \
    >"$root/etc/apt/apt.conf.d/99machine" || true
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) main' \
    'Created-By: Packages' 'Component: main' >"$root/etc/apt/sources.list"
}

# pip's settings, and the folders and files that they name, at the same places.
copy_pip_settings() {
  local path
  for path in /etc/pip.conf /etc/xdg/pip $(pip_paths); do show "$path" "$path"; done
  for path in .pip .config/pip; do show ~/"$path" "$home/$path"; done
}

# An index of pip is a folder, and its pages name files beside it.
pip_paths() {
  { python3 -m pip config list || true; } | grep -oE "(file://)?/[^' ]+" |
    sed -E 's,^file://(.*)/[^/]+/?$,\1,' | sort -u || true
}

# show FROM TO: a file or folder of this machine, read-only.
show() {
  [ -e "$1" ] || return 0
  if [ -d "$1" ]; then
    mkdir -p "$root$2"
  elif [ ! -e "$root$2" ]; then
    install -D /dev/null "$root$2"
  fi
  mount --bind -o ro "$1" "$root$2"
}

# As in a container: apt knows where packages are, and has no lists of them.
prepare_absent() { rm -rf "$root"/var/lib/apt/lists/*; }

# With what the README names, and no more to be had.
prepare_unreachable() {
  apt_install libnuma1
  rm -rf "$root"/var/lib/apt/lists/* "$root/etc/apt/sources.list"
}

prepare_present() { apt_install libnuma1 libnghttp2-dev libssl-dev; }

apt_install() {
  in_root apt-get update -qq
  in_root apt-get install -y -qq "$@" >/dev/null
}

make_user() {
  in_root useradd --create-home --shell /bin/bash "$user"
  mkdir "$root$home/.config"
  git clone --quiet --no-hardlinks . "$root$clone"
  in_root chown -R "$user:" "$home"
}

as_user() { in_root --userspec="$user" bash -c 'cd "$HOME/vllm_duck" && exec "$@"' _ "$@"; }

# Of this machine's environment only what leads to the network, and what its processor
# needs of OpenBLAS.
in_root() {
  local options=()
  while [[ $1 == --* ]]; do options+=("$1"); shift; done
  env -i $(env | grep -E '^(PIP_|OPENBLAS_|[a-zA-Z]+_proxy=|[A-Z]+_PROXY=|[A-Z_]*(CERT|CA_BUNDLE))') \
    HOME="$home" USER="$user" LANG=C.UTF-8 TERM=dumb PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    chroot "${options[@]}" "$root" "$@"
}

check_demo() {
  local transport="the native stream"
  [ "$variant" != unreachable ] || transport="grpcio, since this build is without it"
  grep -qF "47 + 38 = 85" "$root/tmp/demo.txt" || fail "the demo's text cannot add"
  grep -qF "calls   by $transport" "$root/tmp/demo.txt" ||
    fail "the demo's figures do not say: $transport"
}

main
