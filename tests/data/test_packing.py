"""Whole documents in samples (data.order=packed), by best fit."""

from bisect import bisect_left, insort
from collections import Counter

import numpy as np
import pytest
import torch

from hpclm.base.errors import ConfigError
from hpclm.config import BatchConfig, DataConfig, ModelConfig, RunConfig
from hpclm.config.data import mixture
from hpclm.data import loss_mask
from hpclm.data.batches import Batches
from hpclm.data.corpus import corpus
from hpclm.data.indexed import IndexedDataset
from hpclm.data.packing import pack
from hpclm.data.sources import PADDING
from hpclm.parallel.mesh import Compute
from hpclm.preprocess.writer import Writer
from tests.data.test_samples import dataset, rows

DRAW = np.random.default_rng(0)


def lengths(count, context):
    return np.minimum(DRAW.lognormal(4, 1.2, count), 5 * context).astype(np.int32)


def one_at_a_time(pieces, room):
    """The number of samples of best-fit decreasing, as textbooks have it."""
    left, samples = [], 0
    for size in sorted(pieces, reverse=True):
        place = bisect_left(left, size)
        samples += place == len(left)
        insort(left, (room if place == len(left) else left.pop(place)) - size)
    return samples


@pytest.mark.parametrize("context", [1, 7, 63, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, 3000])
def test_pieces_cover_every_document_in_as_many_samples_as_one_at_a_time(count, context):
    sizes = lengths(count, context)
    packing = pack(sizes, 11, context, 3)
    ends = 11 + np.cumsum(sizes)
    predicted = [t for end, size in zip(ends, sizes) for t in range(end - size + 1, end)]
    found = [t for start, size in zip(packing.starts, packing.sizes) for t in range(start + 1, start + size)]
    assert sorted(found) == predicted
    whole = Counter(zip(ends - sizes, sizes)) - Counter(zip(packing.starts.tolist(), packing.sizes.tolist()))
    assert all(size < 2 or size > context + 1 for _, size in whole)  # only longer ones are cut
    filled = [packing.sizes[a:b].sum() for a, b in zip(packing.bounds, packing.bounds[1:])]
    assert max(filled, default=0) <= context + 1
    assert len(filled) == one_at_a_time(packing.sizes.tolist(), context + 1)


def test_a_million_documents_are_packed_almost_without_padding():
    sizes = np.minimum(DRAW.lognormal(6, 1.3, 1_000_000), 1e6).astype(np.int32)
    packing = pack(sizes, 0, 4096, 1)
    assert packing.sizes.sum(dtype=np.int64) / ((len(packing.bounds) - 1) * 4097) > 0.9999


def source(prefix, context=8, seed=1, **data):
    return corpus(DataConfig(prefix=prefix, order="packed", **data), context, seed, 100_000)


def test_samples_hold_whole_documents_and_say_where_they_are(tmp_path):
    made = source(dataset(tmp_path, [5, 1, 4, 0, 20, 3, 2]), split="1", reset_attention_mask=True)
    samples = made.samples("train", None)
    documents, counted = np.empty((2, len(samples), 9), np.int64)
    counted = counted.astype(bool)
    for i in range(len(samples)):
        samples.read_documents(i, documents[i], counted[i])
    predicted = Counter()
    for row, number, counts in zip(rows(samples), documents, counted, strict=True):
        for each in range(number[-1] + 1):
            piece, marks = row[number == each], counts[number == each]
            assert (np.diff(piece) == (0 if piece[0] == PADDING else 1)).all()  # tokens are places in the file
            assert marks.tolist() == [False] + [piece[0] != PADDING] * (len(piece) - 1)
            predicted.update(piece[marks].tolist())
    assert predicted == Counter([*range(1, 5), *range(7, 10), *range(11, 30), *range(31, 33), 34])
    assert made.per_epoch("train") == len(samples) == 4


def test_a_batch_has_documents_and_positions_of_their_own_and_padding_is_one(tmp_path):
    made = source(dataset(tmp_path, [3, 4]), split="1")
    data = DataConfig(prefix="x", order="packed", reset_attention_mask=True, reset_position_ids=True)
    model = ModelConfig.of({"vocab_size": 1000, "context": 8, "hidden": 8, "attention.heads": 1})
    config = RunConfig(model=model, data=data, batch=BatchConfig(global_size=1, micro_size=1))
    compute = Compute(torch.device("cpu"), torch.float32)
    [batch] = Batches(made.samples("train", 1), config.plan(), data, model, None, compute).take(0, 1)
    first = 3 if batch.tokens[0, 0] == 0 else 4
    ids = [*range(3), *range(3, 7)] if first == 3 else [*range(3, 7), *range(3)]
    assert batch.tokens.tolist() == [[*ids, 0]] and batch.labels[0, :6].tolist() == ids[1:]
    assert batch.documents.tolist() == [[0] * first + [1] * (7 - first) + [2]]
    assert batch.positions.tolist() == [[*range(first), *range(7 - first), 0]]
    assert batch.loss_mask.tolist() == [[i not in (first - 1, 6, 7) for i in range(8)]]


def test_the_order_follows_from_data_seed_and_context_and_each_epoch_has_its_own(tmp_path):
    prefix = dataset(tmp_path, lengths(300, 60).clip(0, 900).tolist())
    made = source(prefix, 60, split="8,2")
    count = made.per_epoch("train")
    first, again = (rows(source(prefix, 60, split="8,2").samples("train", 2 * count), 60) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first[:count], first[count:])
    assert sorted(first[:count].tolist()) == sorted(first[count:].tolist())
    assert not np.array_equal(
        first[:count], rows(source(prefix, 60, 2, split="8,2").samples("train", None), 60)[:count]
    )
    places = np.concatenate([first, rows(made.samples("valid", None), 60)])
    assert first.max() < rows(made.samples("valid", None), 60)[:, 0].min() and len(places) > len(first)
    cached = source(prefix, 60, split="8,2", index_cache=str(tmp_path / "index"))
    for _ in range(2):  # built, then read
        assert np.array_equal(rows(cached.samples("train", 2 * count), 60), first)
    assert len([*(tmp_path / "index").glob("*/bounds.npy")]) == 1


def test_packed_datasets_are_blended_by_weight(tmp_path):
    for name, size in (("a", 4), ("b", 9)):
        (tmp_path / name).mkdir()
        dataset(tmp_path / name, [size] * 60)
    blend = ["0.25", f"{tmp_path}/a/x", "0.75", f"{tmp_path}/b/x"]
    made = corpus(DataConfig(blend=blend, order="packed", split="1"), 8, 1, 1000)
    assert made.splits["train"].weights == mixture(blend, "").weights
    samples, kinds = made.samples("train", 40), Counter()
    for i in range(40):
        numbers, counted = np.empty(9, np.int64), np.empty(9, bool)
        samples.read_documents(i, numbers, counted)
        kinds[int(counted.sum())] += 1
    assert kinds == {6: 10, 8: 30}


REFUSED = {
    ("keep_partial=true",): "data.keep_partial=true has no effect with data.order=packed",
    ("short_part=repeat",): "data.short_part=repeat has no effect with data.order=packed",
    ("eod_mask_loss=true",): "data.eod_mask_loss=true has no effect with data.order=packed",
    ("break_mode=eos",): "data.order=packed has no effect with data.break_mode=eos",
    ("source=synthetic",): "data.order=packed has no effect with data.source=synthetic",
}


@pytest.mark.parametrize("words, message", REFUSED.items(), ids=[words[0] for words in REFUSED])
def test_what_contradicts_packing_is_refused(words, message):
    named = dict(word.split("=") for word in words)
    prefix = {} if "source" in named else {"prefix": "x"}
    values = {name: value == "true" if value == "true" else value for name, value in named.items()}
    with pytest.raises(ConfigError, match=message):
        DataConfig(order="packed", **prefix, **values)


def test_a_split_without_a_document_of_two_tokens_is_refused(tmp_path):
    made = source(dataset(tmp_path, [1, 0, 1]), split="1")
    with pytest.raises(ConfigError, match=r"the train split of .* has no document of at least 2 tokens"):
        made.samples("train", None)


def masked(folder, lengths, mask, dtype="u1", name="x_loss"):
    with Writer(folder / name, dtype) as writer:
        for size in lengths:
            writer.add_document(np.resize(mask, size))


def test_the_loss_mask_says_which_tokens_count(tmp_path):
    prefix = dataset(tmp_path, [3, 5])
    masked(tmp_path, [3, 5], [1, 0])
    samples = source(prefix, split="1").samples("train", None)
    row, numbers, counted = np.empty(9, np.int64), np.empty(9, np.int64), np.empty(9, bool)
    samples.read(0, row)
    samples.read_documents(0, numbers, counted)
    assert sorted(row[counted].tolist()) == [2, 5, 7]
    whole = source(prefix, split="1", loss_mask="ignore")
    whole.samples("train", None).read_documents(0, numbers, counted)
    assert counted.sum() == 6
    assert "loss_mask" not in whole.fingerprint["datasets"][0]
    assert "loss_mask" in source(prefix).fingerprint["datasets"][0]


MISMATCHES = {
    "other lengths": (([3, 4], [1]), {}, "its 2 sequences do not have the lengths of the dataset's 2"),
    "other sequences": (([3], [1]), {}, "its 1 sequences"),
    "another type": (([3, 5], [1], "i4"), {}, "is not a loss mask: it has int32 tokens, not uint8"),
    "another order": (([3, 5], [1]), {"order": "mcore"}, "has a loss mask, .*; set data.order=packed"),
    "a longer conversation": (([3, 5], [1]), {"context": 3}, "conversation of 5 tokens.*set model.context=4"),
    "none": (None, {"loss_mask": "require"}, "x_loss.bin"),
}


@pytest.mark.parametrize("mask, settings, message", MISMATCHES.values(), ids=MISMATCHES)
def test_a_loss_mask_that_does_not_fit_is_refused(mask, settings, message, tmp_path):
    prefix = dataset(tmp_path, [3, 5])
    if mask:
        masked(tmp_path, *mask)
    settings = {"order": "packed", **settings}
    context = settings.pop("context", 8)
    with pytest.raises(ConfigError, match=message):
        corpus(DataConfig(prefix=prefix, split="1", **settings), context, 1, 1000).samples("train", None)


def test_the_loss_mask_of_another_dataset_is_refused_by_its_hash(tmp_path):
    prefix = dataset(tmp_path, [3, 5], {"loss_mask": "of another", "content": {}})
    masked(tmp_path, [3, 5], [1])
    with pytest.raises(ConfigError, match="names another mask's hash; preprocess again"):
        source(prefix)


def masks(folder, *counted):
    """A loss mask with these sequences."""
    with Writer(folder / "x_loss", "u1") as writer:
        for sequence in counted:
            writer.add_document(np.array(sequence, "u1"))


def test_data_without_a_token_to_learn_are_refused_and_sequences_without_one_counted(tmp_path):
    prefix = dataset(tmp_path, [3, 5, 2, 4])
    masks(tmp_path, [0, 0, 0], [1, 0, 0, 0, 0], [0, 1], [0, 0, 0, 1])  # nothing predicts the first token
    said = source(prefix, split="1").without_effect()
    assert [line.partition(" have ")[0] for line in said] == [f"2 of 4 sequences of the train split of {prefix}"]
    made = source(prefix, split="1,1")
    with pytest.raises(ConfigError, match=r"the train split of .* has no token to learn: its loss mask excludes every"):
        made.samples("train", None)
    assert made.samples("valid", None)
    assert source(prefix, split="1,1", loss_mask="ignore").samples("train", None)


@pytest.mark.parametrize("together", [1, 3, 100])
def test_sequences_without_a_token_that_counts_are_counted_a_part_at_a_time(together, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_mask, "SEQUENCES", together)
    drawn = np.random.RandomState(1)
    given = [drawn.rand(size) < 0.2 for size in drawn.randint(0, 9, 40)]
    masks(tmp_path, *given)
    for span in (range(40), range(5, 31), range(7, 7)):
        expected = sum(not given[number][1:].any() for number in span)
        assert loss_mask.without_counted(IndexedDataset(tmp_path / "x_loss"), span) == expected
