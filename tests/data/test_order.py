import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpclm.data import order as orders
from hpclm.data.blend import exhaustive, shares, weighted
from hpclm.data.indexed import IndexedDataset
from hpclm.data.order import Order, blocks, build_index, samples_in, shuffled
from hpclm.data.samples import BlendedSamples, BlockSamples, PackedSamples
from hpclm.data.sources import PADDING

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the peers' files are not here")


def lines():
    return IndexedDataset(REFERENCE / "seed2_lines/lines_text_sentence")


def docs():
    return IndexedDataset(REFERENCE / "mcore_docs/docs_text_document")


def rows(samples, context):
    found = np.empty((len(samples), context + 1), np.int64)
    for i, row in enumerate(found):
        samples.read(i, row)
    return found


def digest(rows, whole=False):
    made = hashlib.sha256()
    for row in rows:
        for part in (row,) if whole else (row[:-1], row[1:]):
            made.update(part.astype("<i8").tobytes())
    return made.hexdigest()


# --- the same order by another road: one token at a time


def one_by_one(sizes, documents, total, context):
    """Where samples start, found by walking over every token."""
    places = [(place, offset) for place, document in enumerate(documents) for offset in range(sizes[document])]
    return [places[min(i * context, len(places) - 1)] for i in range(total + 1)]


@settings(deadline=None, max_examples=300)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    span=st.tuples(st.integers(0, 39), st.integers(1, 40)),
    context=st.integers(1, 12),
    wanted=st.none() | st.integers(1, 60),
    policy=st.sampled_from(sorted(orders.LAST_EPOCH_APART)),
    partial=st.booleans(),
    block=st.sampled_from([1, 2, 7, 1 << 18]),
)
def test_samples_start_where_walking_over_the_tokens_finds_them(sizes, span, context, wanted, policy, partial, block):
    sizes = np.array(sizes, np.int32)
    span = range(span[0], min(len(sizes), span[0] + span[1]))
    tokens = int(sizes[span.start : span.stop].sum())
    if not (samples_in(tokens, context, partial) or (tokens and wanted)):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "DOCUMENTS_PER_BLOCK", block)
        index = build_index(sizes, span, Order(context, 5, policy, wanted, partial))
    total = len(index.shuffle)
    assert total >= (wanted or 1)
    assert sorted(index.shuffle.tolist()) == list(range(total))
    assert set(index.documents.tolist()) == set(span)
    passes, rest = divmod(len(index.documents), len(span))
    assert not rest
    assert orders.index_bytes(len(span), tokens, Order(context, 5, policy, wanted, partial)) == sum(
        array.nbytes for array in (index.documents, index.samples[1:], index.shuffle)
    )
    if wanted:  # the fewest passes that hold the samples and the last label
        assert passes * tokens > wanted * context and (passes == 1 or (passes - 1) * tokens <= wanted * context)
    assert [tuple(row) for row in index.samples.tolist()] == one_by_one(sizes, index.documents, total, context)


@pytest.mark.parametrize("policy", sorted(orders.LAST_EPOCH_APART))
@pytest.mark.parametrize(
    "lengths, context, wanted", [([3], 4, 7), ([2, 0, 1, 5], 32, 11), ([1], 1, 1), ([7, 9], 16, 100)]
)
def test_a_part_shorter_than_one_sample_is_repeated_in_megatrons_order(policy, lengths, context, wanted):
    """The peers' steps, one by one: no epoch apart, since a pass holds no whole sample."""
    tokens, passes = sum(lengths), 1
    while passes * tokens < wanted * context + 1:
        passes += 1
    rng = np.random.RandomState(99)
    documents = np.mgrid[0:passes, 0 : len(lengths)][1].reshape(-1).astype(np.int32)
    rng.shuffle(documents)
    total = (passes * tokens - 1) // context
    shuffle = np.arange(total, dtype=np.uint32)
    rng.shuffle(shuffle)
    index = build_index(np.array(lengths, np.int32), range(len(lengths)), Order(context, 99, policy, wanted))
    assert np.array_equal(index.documents, documents) and index.documents.dtype == np.int32
    assert np.array_equal(index.shuffle, shuffle) and index.shuffle.dtype == np.uint32
    assert [tuple(row) for row in index.samples.tolist()] == one_by_one(lengths, documents, total, context)


@needs_reference
def test_a_last_partial_sample_is_padded_as_megatron_core_pads_it():
    theirs = np.load(REFERENCE / "sample_order/mcore/docs_valid_keep_partial.npz")
    facts = json.loads((REFERENCE / "sample_order/mcore/summary.json").read_text())["docs_valid_keep_partial"]
    data, context = docs(), facts["seq_length"]
    span = range(*orders.split_bounds(facts["split"], len(data), "mcore")[1])
    index = build_index(data.sizes, span, Order(context, facts["seed"], keep_partial=True))
    for ours, name in zip(vars(index).values(), ("document_index", "sample_index", "shuffle_index"), strict=True):
        assert ours.dtype == theirs[name].dtype and np.array_equal(ours, theirs[name]), name
    found = rows(PackedSamples(data, index), context)
    assert (found == PADDING).any(1).sum() == 1
    found = np.maximum(found, 0)  # the peer's files have token 0 for its padding
    assert np.array_equal(found[:8], theirs["first8_text"])
    assert digest(found) == facts["sha256_tokens_labels"]


# --- blends


@needs_reference
@pytest.mark.parametrize("policy", ["mcore", "bigscience"])
@pytest.mark.parametrize("part, wanted", [("train", 500), ("valid", 20), ("test", 20)])
def test_a_blend_matches_the_other_projects_sample_for_sample(policy, part, wanted):
    theirs = np.load(REFERENCE / f"sample_order/{policy}/blend_30_70_{part}.npz")
    facts = json.loads((REFERENCE / f"sample_order/{policy}/summary.json").read_text())[f"blend_30_70_{part}"]
    asked, total = shares([3, 7], wanted, policy)
    assert total == wanted and asked == facts.get("sub_num_samples", asked)
    turns = weighted([3, 7], total)
    assert np.array_equal(turns.which, theirs["dataset_index"][:total])
    assert np.array_equal(turns.index, theirs["dataset_sample_index"][:total])

    samples = []
    for data, number in zip((docs(), lines()), asked, strict=True):
        span = range(*orders.split_bounds("900,50,50", len(data), policy)[("train", "valid", "test").index(part)])
        samples.append(PackedSamples(data, build_index(data.sizes, span, Order(32, 1234, policy, number))))
    assert [len(each) for each in samples] == facts.get("sub_lens", [len(each) for each in samples])
    found = rows(BlendedSamples(samples, turns), 32)
    assert np.array_equal(found[:8], theirs["first8_text"])
    assert digest(found, whole=policy == "bigscience") in facts.values()


@needs_reference
def test_an_exhaustive_blend_is_megatron_cores():
    theirs = np.load(REFERENCE / "sample_order/mcore/blend_exhaustive_train.npz")
    facts = json.loads((REFERENCE / "sample_order/mcore/summary.json").read_text())["blend_exhaustive_train"]
    samples = []
    for data in (docs(), lines()):
        span = range(*orders.split_bounds("900,50,50", len(data), "mcore")[0])
        samples.append(PackedSamples(data, build_index(data.sizes, span, Order(32, 1234))))
    turns = exhaustive([len(each) for each in samples])
    assert np.array_equal(turns.which, theirs["dataset_index"])
    assert np.array_equal(turns.index, theirs["dataset_sample_index"])
    assert digest(rows(BlendedSamples(samples, turns), 32)) == facts["sha256_tokens_labels"]


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), total=st.integers(1, 400))
def test_a_blend_stays_within_about_one_sample_of_its_weights(weights, total):
    turns = weighted(weights, total)
    for k, weight in enumerate(weights):
        mine = turns.index[turns.which == k]
        assert mine.tolist() == list(range(len(mine)))
        assert len(mine) < weight / sum(weights) * total + 1 + 1e-9


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_an_exhaustive_blend_contains_every_sample_once(sizes):
    turns = exhaustive(sizes)
    assert sorted(zip(turns.which.tolist(), turns.index.tolist(), strict=True)) == [
        (k, i) for k, size in enumerate(sizes) for i in range(size)
    ]


@given(
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9),
    limits=st.lists(st.integers(0, 60), min_size=9, max_size=9),
)
def test_a_blend_is_megatrons_loop(weights, limits):
    """Whose errors are those of floating point, too."""
    sizes = [limits[0] + 1, *limits[1 : len(weights)]]
    for turns, parts, most in (
        (weighted(weights, 200), [weight / sum(weights) for weight in weights], [200] * len(weights)),
        (exhaustive(sizes), [size / sum(sizes) for size in sizes], sizes),
    ):
        taken = [0] * len(parts)
        for i, (which, index) in enumerate(zip(turns.which, turns.index, strict=True)):
            behind = [parts[k] * max(float(i), 1.0) - taken[k] for k in range(len(parts)) if taken[k] < most[k]]
            left = [k for k in range(len(parts)) if taken[k] < most[k]]
            assert which == left[behind.index(max(behind))] and index == taken[which]
            taken[which] += 1


# --- fairseq's blocks


@needs_reference
@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
def test_blocks_and_their_samples_are_fairseqs(mode):
    theirs = np.load(REFERENCE / f"fairseq_bin/blocks_{mode}_64.npz")
    facts = json.loads((REFERENCE / "fairseq_bin/blocks_summary.json").read_text())[f"{mode}_64"]
    data = IndexedDataset(REFERENCE / "fairseq_bin/train")
    found = blocks(data.sizes, 64, mode)
    assert np.array_equal(found.bounds, theirs["slice_indices"])
    assert np.array_equal(found.fresh, theirs["block_to_dataset_index"][:, 1] == 0)
    samples = BlockSamples(data, 0, found, np.arange(len(found.bounds)), eos=2)
    made = hashlib.sha256()
    for row in rows(samples, 64):
        row = row[row != PADDING]
        made.update(row[:-1].tobytes() + row[1:].tobytes())
    assert made.hexdigest() == facts["sha256_source_target"]


@pytest.mark.parametrize("separator", [None, 1])
@given(sizes=st.lists(st.integers(0, 12), max_size=60), longest=st.integers(1, 30))
def test_blocks_of_whole_lines_are_filled_line_by_line(separator, sizes, longest):
    """A separator ends a document; it and what is left of one token are in no block."""
    wanted, start, end = [], 0, 0
    for size in [*sizes, None]:
        if size in (None, separator) or (end > start and end - start + size > longest):
            if end - start > (0 if separator is None else 1):
                wanted.append([start, end])
            start = end
        end += size or 0
        start = end if size == separator else start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "DOCUMENTS_PER_BLOCK", 7)
        found = blocks(np.array(sizes, np.int32), longest, "complete" if separator is None else "complete_doc")
    assert found.bounds.tolist() == wanted


def test_every_epoch_of_blocks_has_a_different_order():
    order = shuffled(50, 120, seed=3)
    passes = [order[i : i + 50] for i in range(0, 150, 50)]
    assert all(sorted(each.tolist()) == list(range(50)) for each in passes)
    assert not any(np.array_equal(a, b) for a, b in pairwise(passes))
    assert np.array_equal(order, shuffled(50, 150, seed=3))
