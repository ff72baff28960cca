#!/usr/bin/env bash
# What a GPU is needed for, in one command: a real run, benchmarks and tests, the most telling first.
#   tools/gpu_proof.sh                    at most 9.5 minutes; again to continue where it stopped
#   tools/gpu_proof.sh --minutes 30 --out proof
#   tools/gpu_proof.sh --device cpu       a rehearsal without a GPU, with small models
#   PYTHON=/some/python tools/gpu_proof.sh
# The machine needs PyTorch; what else is missing is installed into OUT/site from gpu-wheels/ (tools/gpu_wheels.sh), without a
# network. It may be stopped at any time, even killed: gpu-proof.tar.gz, in the folder that the variable OUT names or else in that
# of --out, holds what is known, at most 15 MB. A stage that fails or takes too long does not stop the next ones.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec "${PYTHON:-$python}" tools/gpu_proof.py "$@"
