#!/usr/bin/env bash
# From nothing to a trained model in one command: set up .venv, then `hpclm demo`, which makes a corpus from this machine's
# Python sources, trains a tokenizer and a small GPT on it, stops half-way, continues, and lets the model write. Minutes on
# two CPU cores, no download but packages. Run again: it continues where it was. Words like budget.steps=100 are passed on
# to the training.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh
PATH="$PWD/.venv/bin:$PATH"
hpclm demo "$@"
printf '   hpclm is in .venv, so before anything else: source .venv/bin/activate\n\n'
