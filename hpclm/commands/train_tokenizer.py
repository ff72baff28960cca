"""``hpclm train-tokenizer``: train a tokenizer."""

from hpclm.datasets.train_tokenizer import main, parser

__all__ = ["main", "parser"]
