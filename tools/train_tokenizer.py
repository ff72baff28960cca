#!/usr/bin/env python
"""Learn a tokenizer from text; ``--help`` says how."""

import sys

from hpclm import cli

if __name__ == "__main__":
    raise SystemExit(cli.main(["train-tokenizer", *sys.argv[1:]]))
