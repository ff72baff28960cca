#!/usr/bin/env bash
# Every check of the project in one command: set up, format, lint, types, tests.
#   tools/test.sh                  all but the tests that need a GPU
#   tools/test.sh -k schedules     words are passed on to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh --dev
PATH="$PWD/.venv/bin:$PATH"

step() { printf '\n== %s\n' "$*"; "$@"; }
step ruff format --check hpclm tools tests
step ruff check hpclm tools tests
step mypy hpclm tools
workers=$(nproc)
export OMP_NUM_THREADS=1 # the workers share the cores
# loadgroup: one worker runs all tests that need a Slurm, which it brings up (as root, on Debian; else they are skipped)
step pytest -n "$workers" --dist loadgroup -m "not gpu" "$@"
printf '\n== all checks passed. Type next:\n\n   tools/demo.sh\n\n'
