#!/usr/bin/env python
"""Learn a tokenizer from text; ``--help`` says how."""

from hpclm import cli
from hpclm.datasets import train_tokenizer

if __name__ == "__main__":
    raise SystemExit(cli.run(train_tokenizer.main))
