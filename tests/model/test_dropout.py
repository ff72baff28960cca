"""The seeds of dropout, and dropout by counters, as compiled blocks on GPUs have it; the arithmetic is the same on a CPU."""

import pytest
import torch

from hpclm.model.dropout import DROPOUT_SITES, LayerSeeds, dropout, philox
from tests import ranks
from tests.engine import sharded
from tests.engine.test_native import GPT2, LLAMA, batches_of, engine_of, settings
from tests.parity import assembled, train


@pytest.mark.parametrize(
    "counter, key, words",  # the vectors published with Random123
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_the_random_words_are_philoxs(counter, key, words):
    found = philox(*(torch.tensor(word) for word in (*counter, key)))
    assert tuple(map(int, found)) == words


def test_values_are_dropped_at_the_rate_asked_for_and_the_rest_scaled():
    keys, x = torch.tensor([-5, 1 << 62]), torch.ones(64, 8, 128, dtype=torch.bfloat16, requires_grad=True)
    first, second = (dropout(x, 0.25, keys, site) for site in range(DROPOUT_SITES))
    assert set(first.unique().tolist()) == {0.0, 1.3359375}  # 4/3 in bf16
    for y in (first, second):
        assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert ((first == 0) & (second == 0)).float().mean().item() == pytest.approx(0.0625, abs=0.01)
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], first)
    assert dropout(x, 0.0, keys) is x


def test_a_slice_of_the_sequence_has_the_whole_ones_mask():
    keys, x = torch.tensor([3, 4]), torch.randn(16, 2, 8)
    whole = dropout(x, 0.5, keys, 1)
    parts = [dropout(part, 0.5, keys, 1, rank) for rank, part in enumerate(x.chunk(4))]
    assert torch.equal(torch.cat(parts), whole)


def test_a_compiled_function_draws_the_same_mask_in_one_graph():
    keys, x = torch.tensor([3, 4]), torch.randn(16, 2, 8)
    compiled = torch.compile(dropout, backend="aot_eager", fullgraph=True, dynamic=False)
    for seed in range(3):
        assert torch.equal(compiled(x, 0.5, keys + seed, 1), dropout(x, 0.5, keys + seed, 1))
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(dropout.__code__)) == 1


def counted(words):
    """Losses and shards of a run whose dropout goes by counters."""
    LayerSeeds.by_counter = True
    found = train(words, 3)
    return {"losses": found["losses"], "held": found["held"]}


WORDS = ["engine.precision=fp32", "model.layers=4", "batch.micro_size=2", "model.dropout=0.2"]


@pytest.mark.parametrize(
    "size, words",
    [
        (2, []),
        (4, ["parallel.tensor=2", "parallel.context=2"]),
        (2, ["engine.name=pipelining", "parallel.pipeline=2"]),
        (2, ["engine.name=fsdp2", "engine.recompute=full", "engine.recompute_every=2"]),
        pytest.param(4, ["parallel.tensor=2", "engine.recompute=full"], marks=pytest.mark.whole),
        pytest.param(2, ["engine.name=deepspeed"], marks=pytest.mark.whole),
        pytest.param(2, ["engine.name=deepspeed", "parallel.pipeline=2"], marks=pytest.mark.whole),
    ],
    ids=lambda value: "-".join(word.split("=")[1] for word in value) if isinstance(value, list) else str(value),
)
def test_masks_by_counters_are_the_same_in_every_layout(size, words):
    (alone,) = ranks.run(1, counted, WORDS)
    found = ranks.run(size, counted, [*WORDS, *words])
    assert found[0]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    wanted = assembled([alone])
    for name, tensor in assembled(found).items():
        assert (tensor - wanted[name]).abs().max().item() < 1e-5, name


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_step_by_counters_seeds_nothing_between_its_layers(shape, recompute, monkeypatch):
    monkeypatch.setattr(LayerSeeds, "by_counter", True)
    config, seeded = settings(dict(shape, dropout=0.2), dict(recompute=recompute)), []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    engine, batches = engine_of(config), batches_of(config)
    results = [engine.train_step(batches.step(8 * step), 3e-3, step) for step in range(2)]
    assert not seeded
    if recompute == "none":
        monkeypatch.undo()
        engine, batches = engine_of(config), batches_of(config)
        other = [engine.train_step(batches.step(8 * step), 3e-3, step) for step in range(2)]
        assert results[0].loss != other[0].loss and results[0].loss == pytest.approx(other[0].loss, rel=0.05)


def test_attention_dropout_still_has_a_seed_for_each_layer(monkeypatch):
    monkeypatch.setattr(LayerSeeds, "by_counter", True)
    config = settings({**GPT2, "dropout": 0.2, "attention.dropout": 0.2}, dict(recompute="full"))
    plain = settings({**GPT2, "dropout": 0.2, "attention.dropout": 0.2})
    for each in (config, plain):
        engine, batches = engine_of(each), batches_of(each)
        each_loss = [engine.train_step(batches.step(8 * step), 3e-3, step).loss for step in range(2)]
        if each is config:
            wanted = each_loss
    assert each_loss == wanted


def seeds(words):
    """What this rank seeds PyTorch's generator with in two steps, before each layer."""
    run, engine, batches, _ = sharded.made(words)
    drawn, seed = [], torch.manual_seed
    torch.manual_seed = lambda number: (drawn.append(number), seed(number))[1]
    sharded.steps(run, engine, batches, 0, 2)
    return drawn


def test_no_two_layers_micro_batches_steps_or_ranks_have_the_same_seed():
    words = ["engine.precision=fp32", "model.layers=2", "batch.micro_size=2", "model.dropout=0.1", "parallel.tensor=2"]
    drawn = [seed for rank in ranks.run(4, seeds, words) for seed in rank]
    layers, micro_batches, steps = 6, 2, 2
    assert len(set(drawn)) == len(drawn) == 4 * steps * micro_batches * layers
