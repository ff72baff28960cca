import queue
import struct
import threading

import numpy as np
import pytest
import torch
import xxhash

from hpclm.base.errors import ConfigError
from hpclm.config import BatchConfig, BudgetConfig, DataConfig, ModelConfig, RunConfig
from hpclm.data import sources
from hpclm.data.batches import Batches, Prefetch
from hpclm.data.sources import PADDING
from hpclm.parallel.mesh import Axis, Compute, Mesh
from tests.runs import PATIENCE

CPU = torch.device("cpu")
CONTEXT, EOD = 6, 9


class Counting:
    """Sample i is i, i + 1, ...; the last third of every fifth is missing."""

    dtype = np.dtype(np.int64)

    def __init__(self, length=100, padded=False):
        self.length, self.padded = length, padded

    def __len__(self):
        return self.length

    def read(self, index, row):
        row[:] = np.arange(index, index + len(row))
        if self.padded and index % 5 == 0:
            row[-2:] = PADDING


class Rows:
    """Samples given as they are."""

    dtype = np.dtype(np.int64)

    def __init__(self, *rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def read(self, index, row):
        row[:] = self.rows[index]


def batches(
    samples=None,
    replica=0,
    replicas=1,
    workers=0,
    rampup=None,
    eod=None,
    device=CPU,
    vocab_size=200,
    micro_size=2,
    **data,
):
    config = RunConfig(
        model=ModelConfig.of(
            {"vocab_size": vocab_size, "layers": 1, "hidden": 8, "attention.heads": 2, "context": CONTEXT}
        ),
        data=DataConfig(source="synthetic", workers=workers, **data),
        batch=BatchConfig(global_size=12, micro_size=micro_size, rampup=rampup),
        budget=BudgetConfig(steps=10),
    )
    mesh = Mesh(dp=Axis(replicas, replica))
    compute = Compute(device, torch.float32, mesh)
    return Batches(samples or Counting(), config.plan(replicas), config.data, config.model, eod, compute)


def first(found):
    """The samples in the micro-batches, by their first token."""
    return [batch.tokens[:, 0].tolist() for batch in found]


def test_a_step_reads_the_samples_after_those_consumed():
    made = batches()
    assert first(made.step(0)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert first(made.step(24))[0] == [24, 25]
    [batch] = made.take(7, 2)
    assert batch.tokens[0].tolist() == [7, 8, 9, 10, 11, 12] and batch.labels[0].tolist() == [8, 9, 10, 11, 12, 13]
    assert batch.loss_mask is batch.positions is batch.documents is None


def test_past_the_end_the_samples_repeat():
    assert first(batches(Counting(10)).take(8, 4)) == [[8, 9], [0, 1]]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 12])
def test_every_replica_gets_as_many_micro_batches_of_one_shape_in_which_each_sample_counts_once(replicas, count):
    found = [list(batches(None, replica, replicas).take(3, count)) for replica in range(replicas)]
    assert {len(mine) for mine in found} == {-(-count // (2 * replicas))}
    together = [batch for mine in found for batch in mine]
    assert all(batch.tokens.shape == (2, CONTEXT) for batch in together)
    counted = [batch.tokens[batch.mask().bool()] for batch in together]
    assert sorted(torch.cat(counted).tolist()) == sorted(i + j for i in range(3, 3 + count) for j in range(CONTEXT))


@pytest.mark.parametrize("micro_size", [1, 2])
def test_masks_have_the_same_strides_whether_samples_are_padded_or_lacking(micro_size):
    made = [batches(Counting(padded=True), replica, 2, micro_size=micro_size) for replica in range(2)]
    masks = [batch.mask() for mine in made for batch in (*mine.step(0), *mine.take(0, 5))]
    assert {mask.stride() for mask in masks} == {(CONTEXT, 1)}


@pytest.mark.parametrize("replicas", [1, 2, 3, 6])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_replicas_share_out_one_and_the_same_step_whatever_their_number_and_the_threads(replicas, workers):
    for consumed in (0, 12, 36):
        found = [first(batches(None, r, replicas, workers).step(consumed)) for r in range(replicas)]
        dealt = [chunk for turn in zip(*found, strict=True) for chunk in turn]
        assert dealt == first(batches().step(consumed))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_sum_of_a_step_is_that_of_the_hashes_of_its_samples_in_8_bytes_whatever_is_done_with_them(replicas):
    samples = Counting(padded=True)
    rows = np.empty((12, CONTEXT + 1), np.int64)
    for number, row in enumerate(rows, 24):
        samples.read(number % len(samples), row)
    expected = sum(xxhash.xxh3_64_intdigest(struct.pack("<7q", *row)) for row in rows.tolist())
    total = 0
    for replica in range(replicas):
        made = batches(samples, replica, replicas, eod=EOD, eod_mask_loss=True)
        made.step(24)
        total += made.hash
    assert total % 2**64 == expected % 2**64


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_reading_ahead_follows_a_batch_ramp_and_any_jump(workers):
    ahead, plain = batches(workers=workers, rampup=(4, 4, 30)), batches(rampup=(4, 4, 30))
    consumed = 0
    for _ in range(8):
        assert first(ahead.step(consumed)) == first(plain.step(consumed))
        consumed += plain.plan.batch_size(consumed)
    for consumed in (60, 3, 3, 0):
        assert first(ahead.step(consumed)) == first(plain.step(consumed))


def test_the_next_steps_are_prefetched():
    made, done = queue.Queue(), []

    def make(key):
        made.put(key)
        return -key

    prefetch = Prefetch(make, lambda key: key + 1, threads=2)
    assert prefetch(0) == 0
    assert sorted(made.get(timeout=PATIENCE) for _ in range(4)) == [0, 1, 2, 3]  # of which 0 alone was asked for
    done += [prefetch(key) for key in range(1, 6)]
    assert done == [-1, -2, -3, -4, -5]
    assert sorted(made.get(timeout=PATIENCE) for _ in range(5)) == [4, 5, 6, 7, 8]  # nothing is made twice
    prefetch.close()


def test_threads_that_read_ahead_use_the_gpu_of_their_rank(monkeypatch):
    """In the first GPU, which every thread begins with, what they pin would take memory for each rank of the node."""
    used, pinned = {}, queue.Queue()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.update({threading.get_ident(): device}))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.put(threading.get_ident()) or tensor)
    made = batches(workers=1, device=torch.device("cuda", 3))
    made._ahead(0)
    threads = {pinned.get(timeout=PATIENCE)}
    made.close()
    assert {used[thread] for thread in threads} == {torch.device("cuda", 3)} and threading.get_ident() not in threads


def test_closing_cancels_pending_prefetches():
    begun, go = threading.Event(), threading.Event()
    made = []

    def make(key):
        made.append(key)
        if key == 1:
            begun.set()
            assert go.wait(PATIENCE)
        return key

    prefetch = Prefetch(make, lambda key: key + 1, threads=1)
    assert prefetch(0) == 0 and begun.wait(PATIENCE)
    prefetch.close()
    go.set()
    prefetch._pool.shutdown(wait=True)
    assert made == [0, 1]


def test_an_error_while_reading_ahead_reaches_the_step_that_needs_it():
    made = batches(Counting(1000), workers=1)
    assert made.step(180)
    with pytest.raises(ConfigError, match=r"sample 194 holds token 200, outside model.vocab_size=200"):
        made.step(192)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int64, int, "uint32"])
@pytest.mark.parametrize("begin, end, said", [(0, 5, "only 5"), (0, 0, "only 0"), (3, 7, "only 0")])
def test_a_row_that_a_source_does_not_fill_is_refused(begin, end, said, dtype):
    class Short(Rows):
        def read(self, index, row):
            super().read(index, row) if index != 1 else row.__setitem__(slice(begin, end), 7)

    Short.dtype = dtype
    source = Short(*[[3] * 7] * 12)
    with pytest.raises(
        ConfigError, match=f"data.source=synthetic sets {said} of the 7 tokens of sample 1; fill the row"
    ):
        batches(source).step(0)


def test_the_greatest_number_of_a_type_may_be_a_token_and_rows_are_integers():
    class Bytes(Rows):
        dtype = np.dtype(np.uint8)

    [loaded] = batches(Bytes([255] * 7, [0] * 7), vocab_size=256).take(0, 2)
    assert loaded.tokens[0].tolist() == [255] * 6
    Bytes.dtype = np.dtype(np.float32)
    with pytest.raises(ConfigError, match="has rows of float32, not of integers"):
        batches(Bytes([0] * 7))


@pytest.mark.parametrize("token", [200, -1, -3])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ConfigError, match=f"sample 1 holds token {token}, outside"):
        batches(Rows([0] * 7, [0, 1, 2, token, 4, 5, 6])).step(0)
    with pytest.raises(ConfigError, match=f"sample 1 holds token {token}, outside"):
        batches(Rows([0] * 5 + [PADDING] * 2, [0, 1, 2, token, 4, 5, 6])).step(0)


def test_padding_of_a_short_sample_is_masked_in_the_loss():
    [batch] = batches(Counting(padded=True)).take(5, 2)
    assert batch.loss_mask.tolist() == [[True] * 4 + [False] * 2, [True] * 6]
    assert batch.tokens[0].tolist() == [5, 6, 7, 8, 9, 0] and batch.labels[0].tolist() == [6, 7, 8, 9, 0, 0]
    [whole] = batches(Counting(padded=True)).take(6, 2)
    assert whole.loss_mask is None


DOCUMENTS = [1, 2, EOD, 3, EOD, EOD, 4]


def test_tokens_after_an_end_of_document_are_masked_in_the_loss():
    [batch] = batches(Rows(DOCUMENTS), eod=EOD, eod_mask_loss=True).take(0, 1)
    assert batch.loss_mask.tolist() == [[True, True, False, True, False, False], [False] * CONTEXT]
    [both] = batches(Rows([*DOCUMENTS[:4], EOD, PADDING, PADDING]), eod=EOD, eod_mask_loss=True).take(0, 1)
    assert both.loss_mask.tolist() == [[True, True, False, True, False, False], [False] * CONTEXT]


def test_positions_and_attention_can_stay_inside_a_document():
    [batch] = batches(Rows(DOCUMENTS), eod=EOD, reset_position_ids=True, reset_attention_mask=True).take(0, 1)
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]] * 2
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 2]] * 2


@pytest.mark.parametrize("option", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_they_need_to_know_the_end_of_document_token(option):
    with pytest.raises(ConfigError, match=f"data.{option} needs the end-of-document token"):
        batches(**{option: True})


def test_the_synthetic_language_is_a_source_like_any_other():
    config = RunConfig(data=DataConfig(source="synthetic"), model=ModelConfig(vocab_size=64, context=CONTEXT))
    source = sources.build_source(config.data, config.model, config.seed)
    assert source.held_out == ["valid"]
    rows = np.empty((2, CONTEXT + 1), np.int64)
    for part, row in zip(("train", "valid"), rows, strict=True):
        source.samples(part, 5).read(3, row)
    assert rows.min() >= 0 and rows.max() < 64 and rows[0].tolist() != rows[1].tolist()
