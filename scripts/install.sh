#!/usr/bin/env bash
# Makes a virtual environment and installs the trainer with the pinned versions.
#
# torch goes first: on Linux, PyPI's build brings gigabytes of CUDA libraries, so a machine without
# an NVIDIA driver gets a CPU build where one can be had (from pip's own sources, then PyTorch's).
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
venv="${VENV:-.venv}"
torch_cpu_index="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"
torch_version="$(sed -n 's/^torch==//p' constraints.txt)"

"$python" - <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Python {sys.version.split()[0]} found, 3.11 or newer needed: make PYTHON=python3.11")
PY

if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv" || {
        echo "no virtual environment could be made; on Debian: apt-get install python3-venv" >&2
        exit 1
    }
fi
# Twice quiet: errors only, not a warning for every place looked at in vain.
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet)

has_nvidia_driver() {
    [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1
}

install_torch() {
    if [ "$(uname -s)" = Linux ] && ! has_nvidia_driver; then
        echo "no NVIDIA driver: installing torch $torch_version for CPUs"
        "${pip[@]}" install "torch==$torch_version+cpu" 2>/dev/null && return
        "${pip[@]}" install --retries 1 --index-url "$torch_cpu_index" \
            "torch==$torch_version+cpu" 2>/dev/null && return
    fi
    "${pip[@]}" install "torch==$torch_version"
}

install_torch
echo "installing the trainer and its tools (some minutes)"
"${pip[@]}" install -c constraints.txt -e '.[dev]'
"$venv/bin/trainer" --version
