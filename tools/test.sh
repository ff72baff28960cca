#!/usr/bin/env bash
# Every check of the project in one command: set up, format, lint, types, tests.
#   tools/test.sh                  the cheap tests and a choice of others: ten minutes on two cores
#   tools/test.sh --more           all tests but those that need a GPU; of long tables, a sample: 35 minutes
#   tools/test.sh --whole          with the whole of every table: hours
#   tools/test.sh -k schedules     other words are passed on to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
size=first
for word; do
    shift
    case $word in
        --more | --whole) size=${word#--} ;;
        *) set -- "$@" "$word" ;;
    esac
done
tools/setup.sh --dev
PATH="$PWD/.venv/bin:$PATH"
told=$(mktemp)
trap 'rm -f "$told"' EXIT

step() { printf '\n== %s\n' "$*"; "$@"; }
step ruff format --check hpclm tools tests
step ruff check hpclm tools tests
mypy hpclm tools >"$told" 2>&1 & # beside the tests
mypy=$!
tests=(--size "$size" -m "not gpu")
# pytest rewrites the asserts of all tests, which takes some ten seconds: once here, not in each worker
PYTHONDONTWRITEBYTECODE="" pytest --collect-only -qq "${tests[@]}" >/dev/null 2>&1 || true # what cannot be collected is told below
workers=$(($(env -u OMP_NUM_THREADS nproc) + 1)) # much of the time goes by in waiting for Slurm, time limits and ends of processes
export OMP_NUM_THREADS=1   # the workers share the cores
failed=""
# loadgroup: one worker runs all tests that need a Slurm, which it brings up (as root, on Debian; else they are skipped)
# No test goes by the clock. One that kills real processes may still meet a race that nobody knows of: it gets a second try;
# its first failure is printed anyway, and only a few retries are allowed.
step pytest -n "$workers" --dist loadgroup --durations=25 --reruns 1 --max-suite-reruns 4 --rerun-show-tracebacks \
    "${tests[@]}" "$@" || failed=yes
printf '\n== mypy hpclm tools\n'
wait "$mypy" || failed=yes
cat "$told"
[ -z "$failed" ]
printf '\n== all checks passed. Type next:\n\n   tools/demo.sh\n\n'
