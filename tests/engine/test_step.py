"""The parts of a step: weights of tokens, seeds, the loss of an evaluation and the times of its phases."""

import random

import numpy as np
import pytest
import torch

from hpclm import config
from hpclm.engine import step
from hpclm.engine.step import Timers, equal_weights, mean_loss, seed_step, seeds, token_weights
from hpclm.parallel.mesh import SINGLE, Axis, Mesh
from hpclm.parallel.micro_batch import MicroBatch, ModelOutput

MASKS = [[[1, 0, 1], [1, 0, 0]], [[0, 0, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 0]]]


def micro_batch(mask):
    ids = torch.arange(6).view(2, 3)
    return MicroBatch(ids, ids + 1, None if mask is None else torch.tensor(mask).bool())


def test_every_token_of_a_step_that_counts_weighs_the_same():
    weights, counted, empty = token_weights([micro_batch(mask) for mask in MASKS], "token", Mesh())
    assert [weight.tolist() for weight in weights] == [(torch.tensor(mask) / 4).tolist() for mask in MASKS]
    assert (counted.item(), empty.item()) == (4, 0)
    weights, counted, _ = token_weights([micro_batch(None)] * 2, "token", Mesh())
    assert all((weight == 1 / 12).all() for weight in weights) and counted == 12
    weights, counted, _ = token_weights([micro_batch(MASKS[2])], "token", Mesh())
    assert not weights[0].any() and counted == 0


def test_every_micro_batch_weighs_the_same_and_one_without_a_token_has_a_mean_of_0():
    weights, counted, empty = token_weights([micro_batch(mask) for mask in MASKS], "microbatch", Mesh())
    assert [weight.sum().item() for weight in weights] == pytest.approx([1 / 3, 1 / 3, 0])
    assert weights[0].tolist() == pytest.approx(torch.tensor(MASKS[0]) / 9)
    assert (counted.item(), empty.item()) == (4, 1)
    alone, *_ = token_weights([micro_batch(None)], "microbatch", Mesh(dp=Axis(4, 1)))
    assert alone[0].sum().item() == pytest.approx(1 / 4)  # of four replicas


@pytest.mark.parametrize("loss_norm", ["token", "microbatch"])
@pytest.mark.parametrize("replicas, parts", [(1, 1), (3, 1), (2, 2)])
def test_without_a_mask_the_host_knows_the_weights_that_replicas_would_agree_on(
    loss_norm, replicas, parts, monkeypatch
):
    mesh = Mesh(dp=Axis(replicas * parts, 0), cp=Axis(parts, 0))
    given = [micro_batch(None)] * 5
    found, *scalars = equal_weights(given, loss_norm, mesh)
    monkeypatch.setattr(step, "all_reduce", lambda x, axis: x * axis.size)  # as if all replicas had these
    wanted, *sums = token_weights(given, loss_norm, mesh)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))
    assert [x.item() for x in scalars] == [x.item() for x in sums]
    with pytest.raises(ValueError, match="loss mask"):
        equal_weights([*given, micro_batch(MASKS[0])], loss_norm, mesh)


@pytest.mark.parametrize(
    "words, wanted",
    [
        ([], True),
        (["data.eod_mask_loss=true"], False),
        (["data.source=indexed", "data.prefix=x", "data.order=packed"], False),
        (["data.source=tests.data.sources:made"], False),
        (["data.source=indexed", "data.prefix=x"], True),
        (["data.source=indexed", "data.prefix=x", "data.break_mode=complete"], False),
    ],
)
def test_all_tokens_count_unless_samples_are_padded_or_masked(words, wanted):
    assert config.load(None, ["data.source=synthetic", *words]).for_engine().all_tokens_count is wanted


def test_a_micro_batch_has_the_seed_of_its_place_in_the_global_batch():
    whole = seeds(7, 3, 4, Mesh())
    assert len(set(whole)) == 4 and seeds(7, 4, 4, Mesh()) != whole != seeds(8, 3, 4, Mesh())
    parts = [seeds(7, 3, 2, Mesh(dp=Axis(4, rank), cp=Axis(2, rank % 2))) for rank in range(4)]
    assert parts == [whole[::2], whole[::2], whole[1::2], whole[1::2]]


def test_the_loss_of_an_evaluation_is_the_mean_over_all_tokens_that_count():
    def forward(batch):
        return ModelOutput((batch.weights * batch.tokens).sum(), {})

    given = [micro_batch(mask) for mask in MASKS]
    assert mean_loss(forward, given, torch.device("cpu"), SINGLE) == (0 + 2 + 3 + 3) / 4
    assert mean_loss(forward, given[2:], torch.device("cpu"), SINGLE) is None
    assert mean_loss(forward, [], torch.device("cpu"), SINGLE) is None


def test_the_generators_of_a_step_depend_on_seed_step_and_rank_and_on_nothing_else():
    def drawn(*place):
        seed_step(*place)
        return torch.rand(1).item(), random.random(), np.random.rand()

    assert drawn(1, 2) == drawn(1, 2) == drawn(1, 2, 0)
    every = [drawn(1, 2), drawn(1, 3), drawn(2, 2), drawn(1, 2, 1), drawn(1, 2, 2)]
    assert all(len({draws[kind] for draws in every}) == 5 for kind in range(3))


def test_phases_are_added_up_until_they_are_taken_and_cost_nothing_when_off():
    timers = Timers(torch.device("cpu"), on=True)
    for name in ("forward", "backward", "forward"):
        with timers(name):
            pass
    timers._add("forward", 2.0)
    found = timers.take()
    assert [*found] == ["forward_seconds", "backward_seconds"] and found["forward_seconds"] > 2 > found[
        "backward_seconds"
    ] > 0
    assert timers.take() == {}
    off = Timers(torch.device("cpu"), on=False)
    with off("forward"):
        pass
    assert off.take() == {}


def test_a_part_of_a_micro_batch_has_its_tokens_labels_and_weights_and_whole_documents():
    ids = torch.arange(8)[None]
    batch = MicroBatch(ids, ids + 1, ids % 2 == 0, ids, ids // 4, weights=ids / 8, seed=5)
    part = batch.part(Axis(2, 1))
    places = [2, 3, 4, 5]
    assert part.tokens.tolist() == part.positions.tolist() == [places]
    assert part.labels.tolist() == [[3, 4, 5, 6]] and part.loss_mask.tolist() == [[True, False] * 2]
    assert (
        part.documents is batch.documents and part.seed == 5 and part.weights.tolist() == (ids[:, places] / 8).tolist()
    )
    assert batch.part(SINGLE) is batch and part.mask().dtype == torch.float32
