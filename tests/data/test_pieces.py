"""The tokens of each sample, and the samples of each token, against all rows that are read."""

import numpy as np
import pytest

from hpclm.config import DataConfig, ModelConfig, RunConfig
from hpclm.config.phases import Timeline
from hpclm.data import pieces
from hpclm.data.corpus import corpus
from hpclm.data.pieces import Traceable
from hpclm.data.sources import PADDING
from hpclm.preprocess.writer import Writer

LENGTHS = [5, 1, 0, 40, 3, 8, 8, 0, 17, 2, 0]
KINDS = {
    "one epoch": ({}, None),
    "three epochs": ({}, 30),
    "last epoch apart": (dict(order="bigscience"), 12),
    "dse": (dict(order="dse"), 25),
    "part": (dict(split="50,30,20", split_by="documents"), 9),
    "tokens": (dict(split="61,30,9", split_by="tokens"), 9),
    "packed": (dict(order="packed"), 20),
    "lines": (dict(break_mode="complete"), 9),
    "one line": (dict(break_mode="eos"), 20),
    "blocks": (dict(break_mode="none"), 20),
    "blend": (dict(split="1"), 40),
    "exhaustive": (dict(split="1"), 10),
    "streams": (dict(order="per_dataset"), 40),
    "one stream": (dict(order="per_dataset"), 40),
}


def written(prefix, first):
    """Documents whose tokens are their places in the file, from ``first`` on."""
    with Writer(prefix, "i4") as writer:
        writer.note = {"tokenizer": {"kind": "bytes", "size": 257, "eod": 256, "files": {}}}
        for size in LENGTHS:
            writer.add_document(np.arange(first, first + size))
            first += size
    return str(prefix)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_tokens_of_each_row_and_find_is_their_inverse(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "SCANNED", 7)
    data, requested = KINDS[kind]
    one = written(tmp_path / "one", 0)
    where = {"prefix": one}
    if kind == "blend":
        where = {"blend": ["0.3", one, "0.7", written(tmp_path / "two", 100)]}
    elif kind == "exhaustive":
        where = {"blend": [one, written(tmp_path / "two", 100)]}
    elif kind == "streams":
        where = {"train": ["0.3", one, "0.7", written(tmp_path / "two", 100)]}
    elif kind == "one stream":
        where = {"train": [one]}
    settings = DataConfig(**{"split": "1" if "train" not in where else DataConfig.split, **data, **where})
    context = 40 if "line" in kind else 8  # lines stay whole
    source = corpus(settings, context, 1, 1000)
    if "train" in where:
        run = RunConfig(data=settings, model=ModelConfig(context=context, vocab_size=1000, positions="rope"))
        samples = source.in_phases(Timeline(run), requested)
    else:
        samples = source.samples("train", requested)
    assert isinstance(samples, Traceable)
    width = context + 1
    reads = {}
    for index in range(len(samples)):
        row = np.full(width, -7)
        samples.read(index, row)
        rebuilt = np.full(width, PADDING)
        if settings.break_mode:
            rebuilt[0] = row[0]  # the end of a line before it is of no dataset
        for at, dataset, begin, size in samples.pieces(index):
            assert size > 0
            rebuilt[at : at + size] = samples.datasets[dataset].flat[begin : begin + size]
            for token in range(begin, begin + size):
                reads.setdefault((dataset, token), set()).add(index)
        assert rebuilt.tolist() == row.tolist()
    for number, dataset in enumerate(samples.datasets):
        for begin in range(len(dataset.flat)):
            for end in (begin + 1, begin + 5, len(dataset.flat)):
                expected = set().union(*(reads.get((number, token), set()) for token in range(begin, end)))
                assert samples.find(number, begin, end).tolist() == sorted(expected)
