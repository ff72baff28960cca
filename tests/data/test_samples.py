import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.data.corpus import SPLITS, corpus
from hpclm.data.indexed import IndexedDataset
from hpclm.data.order import Order, build_index, split_bounds
from hpclm.data.samples import PackedSamples
from hpclm.data.tokenizers import build_tokenizer
from hpclm.preprocess.writer import Writer

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
ORDERS = {"mcore": "mcore", "bigscience": "bigscience", "dse": "dse_v1.1.5"}
BYTES = build_tokenizer("bytes", []).fingerprint
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the peers' files are not here")


def dataset(folder, lengths, note=None):
    """Sequences of these lengths; every token is its place in the file."""
    ends = np.cumsum([0, *lengths])
    with Writer(folder / "x", "i4") as writer:
        writer.note = note
        for begin, end in pairwise(ends):
            writer.add_document(np.arange(begin, end))
    return str(folder / "x")


def source(prefix, context=8, vocab_size=1000, **data):
    return corpus(DataConfig(prefix=prefix, **data), context, 1, vocab_size)


def rows(samples, context=8):
    """All samples, [M, S + 1]."""
    found = np.empty((len(samples), context + 1), np.int64)
    for i, row in enumerate(found):
        samples.read(i, row)
    return found


def cases():
    if REFERENCE.is_dir():
        for order, folder in ORDERS.items():
            summary = json.loads((REFERENCE / "sample_order" / folder / "summary.json").read_text())
            for name, facts in summary.items():
                if name.endswith(SPLITS) and not name.startswith("blend"):
                    yield pytest.param(order, name, facts, id=f"{order}-{name}")


@needs_reference
@pytest.mark.parametrize("order, name, facts", list(cases()))
def test_indices_and_samples_match_the_other_project(order, name, facts):
    of_lines = name.startswith("lines")
    data = IndexedDataset(
        REFERENCE / ("seed2_lines/lines_text_sentence" if of_lines else "mcore_docs/docs_text_document")
    )
    bounds = split_bounds(facts["split"], len(data), order)
    span = range(*bounds[SPLITS.index(name.rpartition("_")[2])])
    index = build_index(data.sizes, span, Order(facts["seq_length"], facts["seed"], order, facts["num_samples"]))

    theirs = np.load(REFERENCE / "sample_order" / ORDERS[order] / f"{name}.npz")
    for ours, key in zip((index.documents, index.samples, index.shuffle), theirs, strict=False):
        assert ours.dtype == theirs[key].dtype and np.array_equal(ours, theirs[key]), key

    samples = PackedSamples(data, index)
    assert len(samples) == facts["len"]
    same_samples(rows(samples, facts["seq_length"]), theirs["first8_text"], order, facts)


def same_samples(ours, first, order, facts):
    """Check the first samples, and all of them by the hash that was made of the peer's."""
    assert np.array_equal(ours[: len(first)], first)
    digest = hashlib.sha256()
    for row in ours:
        for part in (row[:-1], row[1:]) if order == "mcore" else (row,):
            digest.update(part.astype("<i8").tobytes())
    assert digest.hexdigest() in facts.values()


@needs_reference
def test_splits_are_rounded_as_each_peer_rounds_them():
    for line in (REFERENCE / "splits/split_bounds.jsonl").read_text().splitlines():
        row = json.loads(line)
        legacy = row["legacy_split_index"]
        for order in ("bigscience", "dse"):
            assert split_bounds(row["split"], row["n"], order) == list(pairwise(legacy)), row
        for ours, theirs in zip(split_bounds(row["split"], row["n"], "mcore"), row["mcore_ranges"], strict=True):
            assert list(ours) == theirs if theirs else ours[0] == ours[1], row


def test_the_two_roundings_differ_where_the_peers_differ():
    assert split_bounds("900,50,50", 7, "mcore") == [(0, 6), (6, 7), (7, 7)]
    assert split_bounds("900,50,50", 7, "dse") == [(0, 7), (7, 7), (7, 7)]
    assert split_bounds("90/5/5", 11, "mcore") == [(0, 10), (10, 10), (10, 11)]
    assert split_bounds("1", 5, "mcore") == split_bounds("1", 5, "bigscience") == [(0, 5), (5, 5), (5, 5)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sequences", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "0,1,1", "0,1", "5,0,5", "0.1,0.2,0.7"])
def test_parts_never_overlap_and_leave_nothing_out(split, sequences, order):
    bounds = split_bounds(split, sequences, order)
    assert [bounds[0][0], bounds[2][1]] == [0, sequences]
    assert all(begin <= end for begin, end in bounds)
    assert bounds[0][1] == bounds[1][0] and bounds[1][1] == bounds[2][0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wanted", [None, 1, 30, 100])
def test_samples_are_the_shuffled_documents_cut_into_pieces(wanted, order, tmp_path):
    lengths = [5, 1, 0, 40, 3, 8, 8, 0, 17, 2]
    data = IndexedDataset(dataset(tmp_path, lengths))
    index = build_index(data.sizes, range(len(lengths)), Order(4, 7, order, wanted))
    samples = PackedSamples(data, index)
    laid = np.concatenate([data.tokens(i) for i in index.documents])
    pieces = [laid[at : at + 5].tolist() for at in range(0, len(laid) - 4, 4)]

    assert len(samples) >= (wanted or 1) and len(samples) == len(pieces)
    assert rows(samples, 4)[np.argsort(index.shuffle)].tolist() == pieces
    assert sorted(index.shuffle) == list(range(len(pieces)))


@pytest.mark.parametrize(
    "order, part_wanted, apart",
    [("mcore", 0.7, True), ("mcore", 0.9, False), ("bigscience", 0.9, True), ("bigscience", 0.97, False)]
    + [("dse", 0.1, False), ("mcore", 1.0, False)],
)
def test_the_last_epoch_is_shuffled_apart_when_little_of_it_is_wanted(order, part_wanted, apart):
    sizes = np.full(100, 10, np.int32)  # with S = 1, 999 samples an epoch
    wanted = 999 + int(999 * part_wanted)
    index = build_index(sizes, range(100), Order(1, 3, order, wanted))
    assert (sorted(index.documents[:100]) == list(range(100))) is apart
    assert bool(index.shuffle[:999].max() < 999) is apart


def test_the_order_follows_from_the_seed_alone():
    sizes = np.full(50, 9, np.int32)
    one, again, other = (build_index(sizes, range(50), Order(4, seed)) for seed in (1, 1, 2))
    assert np.array_equal(one.shuffle, again.shuffle) and np.array_equal(one.documents, again.documents)
    assert not np.array_equal(one.shuffle, other.shuffle) and not np.array_equal(one.documents, other.documents)


def test_a_source_divides_the_dataset_and_counts_samples(tmp_path):
    made = source(dataset(tmp_path, [10] * 10), split="8,1,1")
    assert [made.splits[part].slices[0].tokens for part in SPLITS] == [80, 10, 10]
    assert [made.per_epoch(part) for part in SPLITS] == [9, 1, 1]
    assert rows(made.samples("valid", None))[0].tolist() == list(range(80, 89))
    assert len(made.samples("train", None)) == 9
    assert len(made.samples("train", 100)) >= 100
    assert rows(made.samples("train", None)).max() < 80


def test_a_part_that_is_too_small_says_what_it_has_and_what_it_needs(tmp_path):
    made = source(dataset(tmp_path, [8, 8, 8]), context=16, split="1,1,1")
    for part in SPLITS:
        assert made.per_epoch(part) == 0
        with pytest.raises(ConfigError) as error:
            made.samples(part, 1)
        for word in (f"the {part} split", "has 8 tokens (1 of 3", "data.split=1,1,1", "model.context + 1 = 17"):
            assert word in str(error.value)


def test_a_split_without_training_documents_is_refused_when_training_asks(tmp_path):
    made = source(dataset(tmp_path, [20, 20]), split="0,1,1")
    assert made.per_epoch("train") == 0 and made.per_epoch("valid") == 2
    with pytest.raises(ConfigError, match=r"the train split of .* has 0 tokens"):
        made.samples("train", None)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_an_empty_corpus_is_refused(lengths, tmp_path):
    with pytest.raises(ConfigError, match="has no tokens"):
        source(dataset(tmp_path, lengths))


def test_the_end_of_document_token_comes_from_the_dataset_or_the_settings(tmp_path):
    assert source(dataset(tmp_path, [20])).eod is None
    assert source(dataset(tmp_path, [20], {"tokenizer": BYTES})).eod == 256
    assert source(dataset(tmp_path, [20]), tokenizer="bytes").eod == 256


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    noted = dataset(tmp_path, [20], {"tokenizer": BYTES})
    assert source(noted, vocab_size=257)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=256 is smaller than the 257 .*set model\.vocab_size=257"):
        source(noted, vocab_size=256)
    with pytest.raises(ConfigError, match="smaller than the 257"):
        source(dataset(tmp_path, [20]), vocab_size=256, tokenizer="bytes")


def test_a_vocabulary_much_larger_than_the_tokenizers_is_reported(tmp_path, caplog):
    noted = dataset(tmp_path, [20], {"tokenizer": BYTES})
    source(noted, vocab_size=1024)
    assert not caplog.records
    source(noted, vocab_size=50_304)
    assert "model.vocab_size=50304, but the tokenizer of dataset" in caplog.text and "has 257 entries" in caplog.text


def test_a_tokenizer_the_dataset_was_not_made_with_is_refused(tmp_path):
    vocabularies = []
    for name, words in (("a", ["<unk>", "<|endoftext|>", "x"]), ("b", ["<unk>", "<|endoftext|>", "y"])):
        vocabularies.append(tmp_path / f"{name}.json")
        vocabularies[-1].write_text(json.dumps({word: i for i, word in enumerate(words)}))
    note = {"tokenizer": build_tokenizer("whitespace", [str(vocabularies[0])]).fingerprint}
    prefix = dataset(tmp_path, [20], note)
    assert source(prefix, tokenizer="whitespace", tokenizer_files=[str(vocabularies[0])]).eod == 1
    with pytest.raises(ConfigError, match=r"made with .*a\.json.*given .*b\.json.*the content of the files"):
        source(prefix, tokenizer="whitespace", tokenizer_files=[str(vocabularies[1])])
    with pytest.raises(ConfigError, match="kind whitespace against bytes, size 3 against 257, eod 1 against 256"):
        source(prefix, tokenizer="bytes")


def test_the_fingerprint_changes_with_data_split_order_and_tokenizer_but_not_with_the_place(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    first = source(dataset(folders[0], [20, 20])).fingerprint
    assert json.loads(json.dumps(first)) == first
    assert source(dataset(folders[1], [20, 20])).fingerprint == first
    others = [
        source(dataset(folders[2], [21, 19])).fingerprint,
        source(str(folders[0] / "x"), split="1,1,1").fingerprint,
        source(str(folders[0] / "x"), order="dse").fingerprint,
        source(dataset(folders[2], [20, 20], {"tokenizer": BYTES})).fingerprint,
    ]
    assert first not in others
