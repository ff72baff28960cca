#!/usr/bin/env bash
# Every check of the project in one command: set up, format, lint, types, tests.
#   tools/test.sh                  all tests but those that need a GPU; of long tables, a sample
#   tools/test.sh --whole          with the whole of every table: hours
#   tools/test.sh -k schedules     other words are passed on to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
tests="not gpu"
for word; do
    shift
    if [ "$word" = --whole ]; then
        tests="not gpu and (whole or not whole)" # a -m that names the marker takes it in: tests/conftest.py
    else
        set -- "$@" "$word"
    fi
done
tools/setup.sh --dev
PATH="$PWD/.venv/bin:$PATH"

step() { printf '\n== %s\n' "$*"; "$@"; }
step ruff format --check hpclm tools tests
step ruff check hpclm tools tests
# pytest rewrites the asserts of all tests, which takes some ten seconds: once here, not in each worker. mypy leaves a core idle.
PYTHONDONTWRITEBYTECODE="" pytest --collect-only -qq -m "$tests" >/dev/null 2>&1 &
step mypy hpclm tools
wait || true               # what cannot be collected is told below
workers=$(($(nproc) + 2)) # much of the time goes by in waiting for Slurm, time limits and ends of processes
export OMP_NUM_THREADS=1   # the workers share the cores
# loadgroup: one worker runs all tests that need a Slurm, which it brings up (as root, on Debian; else they are skipped)
# No test goes by the clock. One that kills real processes may still meet a race that nobody knows of: it gets a second try;
# its first failure is printed anyway, and only a few retries are allowed.
step pytest -n "$workers" --dist loadgroup --durations=25 --reruns 1 --max-suite-reruns 4 --rerun-show-tracebacks \
    -m "$tests" "$@"
printf '\n== all checks passed. Type next:\n\n   tools/demo.sh\n\n'
