#!/usr/bin/env bash
# What a GPU is needed for, in one command: tests, benchmarks and traces, the most telling first.
#   tools/gpu_proof.sh                    about 9 minutes; again to continue where it stopped
#   tools/gpu_proof.sh --minutes 30 --out proof
#   tools/gpu_proof.sh --device cpu       a rehearsal without a GPU, with small models
#   PYTHON=/some/python tools/gpu_proof.sh
# It may be stopped at any time: OUT/report.md and OUT/results.json hold what is done. A stage that fails does not stop the next ones.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
python=${PYTHON:-$python}
if ! missing=$("$python" -c '
import importlib.util as u
names = "torch numpy omegaconf safetensors submitit tqdm pytest xxhash psutil".split()
print(" ".join(n for n in names if u.find_spec(n) is None))') || [ -n "$missing" ]; then
    echo "$python lacks ${missing:-what it needs}: run tools/setup.sh --dev, or pip install -e '.[dev]' beside your PyTorch" >&2
    exit 64
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" tools/gpu_proof.py "$@"
