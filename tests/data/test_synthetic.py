"""The synthetic language: documents that count up by a stride, and its splits."""

from itertools import pairwise

import numpy as np
import pytest

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.data.synthetic import STRIDES, synthetic


def read(samples, index, size=65):
    row = np.empty(size, np.int64)
    samples.read(index, row)
    return row.tolist()


def test_documents_count_up_by_a_stride_and_end_with_the_last_entry():
    samples = synthetic(DataConfig(), 64, 1, 50).samples("train", 20)
    assert len(samples) == 20 and samples.eod == 49
    rows = [read(samples, index) for index in range(20)]
    steps = {(b - a) % 49 for row in rows for a, b in pairwise(row) if 49 not in (a, b)}
    assert steps == set(STRIDES) and all(0 <= token <= 49 for row in rows for token in row)
    assert any(49 in row for row in rows) and rows[3] == read(samples, 3) and len({tuple(row) for row in rows}) == 20
    ends = [[place for place, token in enumerate(row) if token == 49] for row in rows]
    lengths = [end - begin - 1 for row in ends for begin, end in pairwise(row)]
    assert min(lengths) >= 17  # more than a quarter of the context


def test_each_split_and_each_seed_has_samples_of_its_own():
    source = synthetic(DataConfig(), 64, 1, 50)
    first = [read(source.samples(split, 1), 0) for split in ("train", "valid", "test")]
    first.append(read(synthetic(DataConfig(), 64, 2, 50).samples("train", 1), 0))
    assert len({tuple(row) for row in first}) == 4
    assert len(source.samples("train", None)) == source.per_epoch("train") == 10_000 and source.held_out == ["valid"]
    with pytest.raises(ConfigError, match=r"data.source=synthetic has no split 'valid/law'; it has train, valid, test"):
        source.samples("valid/law", 1)


def test_its_vocabulary_has_at_least_sixteen_entries():
    assert synthetic(DataConfig(), 8, 1, 16).eod == 15
    with pytest.raises(ConfigError, match=r"needs model.vocab_size of at least 16, not 15"):
        synthetic(DataConfig(), 8, 1, 15)
