"""Make inputs, preprocess them as a person does, and read what comes out."""

import json
import sys
from itertools import pairwise
from pathlib import Path

from hpclm import cli
from hpclm.data.indexed import IndexedDataset

COMMAND = [sys.executable, "-m", "hpclm", "preprocess"]
AT_ONCE = """import sys
from hpclm import cli
from hpclm.preprocess import workers
workers.ALONE = 0
sys.exit(cli.main(["preprocess", *sys.argv[1:]]))"""
WITH_WORKERS = [sys.executable, "-c", AT_ONCE]
"""COMMAND, whose workers start at once, though the text is short."""


def preprocess(*words):
    return cli.main(["preprocess", *map(str, words)])


def jsonl(*texts, key="text"):
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts))


def write(**files):
    """Files {name: content} in the working folder."""
    for name, content in files.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def documents(prefix):
    """Each document of a dataset of bytes, as a list of its sequences; 256, the end, is written as |."""
    dataset = IndexedDataset(prefix)
    sequences = ["".join(chr(id) if id != 256 else "\0" for id in dataset.tokens(i)) for i in range(len(dataset))]
    texts = [text.replace("\0", "").encode("latin-1").decode() + "|" * text.count("\0") for text in sequences]
    bounds = dataset.documents.tolist()
    return [texts[begin:end] for begin, end in pairwise(bounds)]


def content(prefix, *ends):
    """The bytes of a dataset's files."""
    return [Path(f"{prefix}.{end}").read_bytes() for end in ends or ("bin", "idx", "json")]
