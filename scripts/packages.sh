# Sourced by the scripts of set-up: packages of this system, with and without root.

# The first package manager that this machine has, or nothing.
package_manager() {
  local name
  for name in apt-get dnf zypper pacman apk; do
    command -v "$name" >/dev/null && { echo "$name"; return; }
  done
}

# install_command APT-GET DNF ZYPPER PACMAN APK: the command that installs a package,
# which each manager knows by another name.
install_command() {
  local sudo="sudo "
  [ "$(id -u)" != 0 ] || sudo=""
  case $(package_manager) in
    apt-get) echo "${sudo}apt-get install -y $1" ;;
    dnf) echo "${sudo}dnf install -y $2" ;;
    zypper) echo "${sudo}zypper --non-interactive install $3" ;;
    pacman) echo "${sudo}pacman -S --noconfirm --needed $4" ;;
    apk) echo "${sudo}apk add $5" ;;
    *) echo "install $1 (Fedora: $2) with this system's package manager" ;;
  esac
}

nghttp2_command() {
  install_command libnghttp2-dev libnghttp2-devel libnghttp2-devel libnghttp2 nghttp2-dev
}

openssl_command() {
  install_command libssl-dev openssl-devel libopenssl-devel openssl openssl-dev
}

numa_command() { install_command libnuma1 numactl-libs libnuma1 numactl numactl; }

# install_silently COMMAND: as root or with passwordless sudo; never asks.
install_silently() {
  [ -n "$(package_manager)" ] || return 1
  [ "$(id -u)" = 0 ] || sudo -n true || return 1
  export DEBIAN_FRONTEND=noninteractive
  $1 && return
  # A container often comes without lists of packages.
  [ "$(package_manager)" = apt-get ] && ${1%%apt-get*}apt-get update && $1
}

# bring WHAT FOLDER COMMAND NAME PREFIX: installed, or else unpacked in FOLDER; says which.
# The caller's function `have` tells whether it is there.
bring() {
  if install_silently "$3" >&2 && have; then
    echo "installed: $3"
  elif unpack_deb "$2" "$4" "$5" >&2 && have; then
    echo "unpacked $1 in $2, without root"
  else
    return 1
  fi
}

# bring_headers WHAT FOLDER HEADER LIBRARY COMMAND WITHOUT PACKAGE PREFIX: where they are
# missing; says what came of it, and WITHOUT where they cannot be had. Never fails.
bring_headers() {
  have() {
    [ -n "$(find "$headers_folder" -name "$headers_library" 2>/dev/null)" ] ||
      "${CXX:-g++}" -fsyntax-only -x c++ - 2>/dev/null <<<"#include <$headers_name>"
  }
  headers_folder=$2 headers_name=$3 headers_library=$4
  if have; then
    echo "headers of $1 are there"
  elif ! bring "$1" "$2" "$5" "$7" "$8"; then
    echo "no headers of $1 to be had, so $6, which takes ten times the CPU;" \
      "to mend it: $5 && make -B venv"
  fi
}

# unpack_deb FOLDER NAME PREFIX: the package, and those of its needs whose names begin
# with PREFIX, without root; only apt lets an ordinary user fetch packages everywhere.
unpack_deb() {
  local work
  [ "$(package_manager)" = apt-get ] || return 1
  work=$(mktemp -d)
  { download_debs "$work" "$2" "$3" || download_by_private_lists "$work" "$2" "$3"; } &&
    mkdir -p "$(dirname "$1")" && rm -rf "$1" && mv "$work/root" "$1"
  local result=$?
  rm -rf "$work"
  return $result
}

download_debs() {
  local work=$1 name=$2 prefix=$3 needs deb
  shift 3
  needs=$(apt-cache "$@" depends "$name") || return 1
  needs=$(sed -n "s/.*Depends: \($prefix.*\)/\1/p" <<<"$needs")
  (cd "$work" && apt-get "$@" download "$name" $needs) || return 1
  for deb in "$work"/*.deb; do dpkg -x "$deb" "$work/root" || return 1; done
}

download_by_private_lists() {
  local private=(-o "Dir::State::Lists=$1/lists" -o "Dir::Cache=$1/cache")
  mkdir -p "$1/lists/partial" "$1/cache/archives/partial"
  apt-get "${private[@]}" update && download_debs "$@" "${private[@]}"
}
