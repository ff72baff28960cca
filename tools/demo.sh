#!/usr/bin/env bash
# From nothing to a trained model in one command: set up, make a corpus from this machine's Python sources, train a
# tokenizer and a small GPT on it, stop half-way, go on, and let the model write. Minutes on two CPU cores, no download
# but packages. Run again: it goes on from where it is. Words like budget.steps=100 are passed on to the training.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh
PATH="$PWD/.venv/bin:$PATH"

step() { printf '\n== %s\n' "$1"; shift; printf '   $'; printf ' %q' "$@"; printf '\n'; "$@"; }

mkdir -p demo
[ -e demo/corpus.jsonl ] || step "1/6 corpus: the sources of Python's standard library, one document a file" \
  python tools/demo_corpus.py demo/corpus.jsonl
[ -e demo/tokenizer.json ] || step "2/6 tokenizer: byte-level BPE, 4,096 entries" \
  python tools/train_tokenizer.py --input demo/corpus.jsonl --output demo/tokenizer.json --vocab-size 4096
[ -e demo/data_text_document.idx ] || step "3/6 dataset: Megatron's .bin and .idx" \
  hpclm preprocess --input demo/corpus.jsonl --output-prefix demo/data --tokenizer json \
  --tokenizer-files demo/tokenizer.json --append-eod --workers 2
step "4/6 training: to step 150, where it is told to stop (a run that is further stays where it is)" hpclm train configs/demo.yaml stop_at=150 "$@"
step "5/6 training: the same command goes on from there" hpclm train configs/demo.yaml "$@"
python tools/demo_curve.py demo/run/metrics.jsonl
step "6/6 the model writes" hpclm generate demo/run --prompt 'def read(self, size):
    """' --tokens 120

cat <<'END'

== done. demo/run holds the run; README.md has a map of it. Type next:

   source .venv/bin/activate
   hpclm generate demo/run --prompt 'import '
   tensorboard --logdir demo/run/tensorboard
   hpclm config configs/demo.yaml --changed

END
