#!/usr/bin/env bash
# Set up .venv in this clone: the right build of PyTorch for the machine, then hpclm with what it needs.
#   tools/setup.sh          for use
#   tools/setup.sh --dev    for the tests too
# Run again at any time: it does only what is missing. PYTHON names another interpreter than python3.
set -euo pipefail
cd "$(dirname "$0")/.."

dev=""
case "${1-}" in
  "") ;;
  --dev) dev=yes ;;
  *) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
say() { printf '\n== %s\n' "$*"; }
quiet=(--disable-pip-version-check --no-compile) # all is compiled at the end, on all cores
uv_quiet=()
if [ ! -t 1 ]; then quiet+=(-qq) uv_quiet=(--quiet); fi # a terminal shows what is on its way

python=${PYTHON:-python3}
install() { # Debian packages, as root or through sudo
  say "installing $* with apt-get"
  local admin=()
  [ "$(id -u)" = 0 ] || admin=(sudo)
  "${admin[@]}" apt-get update -qq
  "${admin[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
usable() { "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
if ! usable && [ -z "${PYTHON-}" ] && command -v apt-get >/dev/null; then
  install python3 python3-venv
fi
if ! usable; then
  echo "error: $python must be Python 3.11 or newer with its venv module (Debian: apt-get install python3-venv)" >&2
  echo "       PYTHON=/path/to/python3.12 $0 uses another one" >&2
  exit 1
fi

exec 9>.venv.lock # two set-ups at once would spoil each other
if command -v flock >/dev/null && ! flock -n 9; then
  say "waiting for another set-up, which has locked $PWD/.venv.lock"
  flock 9 || true # a file system without locks
fi

refuse() { # what is in .venv may be yours: nothing is removed
  echo "error: $PWD/.venv $1; repair it, or move it away, and run $0 again" >&2
  exit 1
}
if [ ! -e .venv ] && [ ! -L .venv ]; then
  say "environment: making .venv with $("$python" --version)"
  "$python" -m venv .venv
fi
.venv/bin/python -c "" 2>/dev/null || refuse "has no Python that runs (.venv/bin/python); a module or a mount may be missing"

wanted=$(cat setup.cfg setup.py pyproject.toml tools/setup.sh | cksum | cut -d' ' -f1)
ready() { [ -x .venv/bin/hpclm ] && [ "$(cat ".venv/$1" 2>/dev/null)" = "$wanted" ]; }
if ready ready-dev || { [ -z "$dev" ] && ready ready; }; then
  say "environment: .venv is ready"
  exit 0
fi

.venv/bin/python -m pip --version >/dev/null 2>&1 || {
  say "environment: adding pip to .venv"
  .venv/bin/python -m ensurepip >/dev/null 2>&1 || { command -v uv >/dev/null && uv pip install --python .venv/bin/python pip; }
} || refuse "has no pip, and neither ensurepip nor uv can install it"
pip=(.venv/bin/python -m pip install "${quiet[@]}")

missing=() # of what tests want
command -v g++ >/dev/null || missing+=(g++ python3-dev) # torch.compile
command -v mpirun >/dev/null || missing+=(openmpi-bin)  # the tests marked mpi
command -v strace >/dev/null || missing+=(strace)       # the tests that kill a save at each of its system calls
command -v zsh >/dev/null || missing+=(zsh)             # the test of completion
installing=""
if [ -n "$dev" ] && [ ${#missing[@]} != 0 ] && command -v apt-get >/dev/null; then
  install "${missing[@]}" & # while PyTorch is on its way
  installing=$!
fi

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  if nvidia-smi -L >/dev/null 2>&1 || [ -e /dev/nvidia0 ]; then
    say "PyTorch: the CUDA build, since this machine has an NVIDIA GPU (some GB; takes minutes)"
    "${pip[@]}" 'torch>=2.11'
  elif [ "$(uname -sm)" != "Linux x86_64" ]; then
    say "PyTorch: the build for $(uname -sm)"
    "${pip[@]}" 'torch>=2.11'
  else
    say "PyTorch: the CPU build, since this machine has no NVIDIA GPU (about 200 MB)"
    # uv knows where PyTorch keeps its CPU builds; pip finds one only where it has been told to look
    "${pip[@]}" 'torch==2.13.0+cpu' 2>/dev/null || {
      "${pip[@]}" uv && .venv/bin/uv pip install "${uv_quiet[@]}" --python .venv/bin/python --torch-backend cpu 'torch>=2.11'
    } || {
      say "PyTorch: no CPU build can be reached; taking the default one (some GB)"
      "${pip[@]}" 'torch>=2.11'
    }
  fi
fi

[ -z "$installing" ] || wait "$installing"
say "hpclm and what it needs${dev:+, and what its tests need}"
extras=deepspeed,fairscale,mpi,plots,convert,text,completion # W&B, MLflow, Trackio and lm-eval bring dozens of packages: docs/python.md
"${pip[@]}" --editable ".[${dev:+dev,}$extras]"
say "compiling"
# what hardly anybody imports waits until somebody does; a few files of libraries are for other Pythons
.venv/bin/python -m compileall -qq -j 0 -x '/tests?/|transformers/models/|/(mlflow|databricks|chardet|nltk|sqlalchemy)/' hpclm .venv/lib || true
printf '%s' "$wanted" > ".venv/ready${dev:+-dev}"
say "environment: .venv is ready, $(.venv/bin/hpclm --version)"
