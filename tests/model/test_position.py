import math

import pytest
import torch

from hpclm.config import ModelConfig
from hpclm.model.attention import layout
from hpclm.model.position import alibi_slopes, frequencies, rotary_rates, sinusoids
from hpclm.parallel.micro_batch import MicroBatch
from tests import weights
from tests.engine import sharded


def test_the_sinusoidal_table_is_fairseqs():
    table = sinusoids(6, 8)
    for row in range(6):
        for column in range(4):
            angle = (row + 2) * math.exp(-column * math.log(10000) / 3)
            assert table[row, column].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[row, 4 + column].item() == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rope", "alibi"])
def test_every_kind_of_position_changes_the_logits_and_restarts_where_told(positions):
    shape = {"vocab_size": 32, "layers": 1, "hidden": 16, "attention.heads": 2, "context": 8, "init_std": 0.3}
    tokens = torch.tensor([[5, 9, 5, 7, 9, 5, 3, 2]])
    model = weights.build(ModelConfig.of({**shape, "positions": positions})).eval()
    blind = weights.build(ModelConfig.of({**shape, "positions": "none"})).eval()
    blind.load_weights({k: v for k, v in model.weights() if k != "entry.table"})
    with torch.no_grad():
        plain = model.head(tokens).logits()
        assert (plain - blind.head(tokens).logits()).abs().max() > 1e-3
        restarted = model(MicroBatch(tokens, positions=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]))).value.logits()
        assert torch.allclose(restarted[:, :4], plain[:, :4], atol=1e-6)
        if positions != "alibi":  # its distances are between tokens, wherever counting starts
            assert (restarted - plain)[:, 4:].abs().max() > 1e-3


def test_embeddings_are_scaled_as_fairseq_does():
    tokens = torch.arange(5)[None]
    plain, scaled = (
        weights.build(
            ModelConfig.of({"vocab_size": 16, "layers": 1, "hidden": 16, "attention.heads": 2, "embed_scale": scale})
        ).layers["tokens"](tokens)
        for scale in (False, True)
    )
    assert torch.allclose(scaled, plain * 4.0)


def test_alibi_slopes_are_the_papers():
    assert alibi_slopes(8, torch.device("cpu")).tolist() == [2.0**-i for i in range(1, 9)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_alibi_s_block_mask_is_made_again_only_when_the_length_changes(monkeypatch):
    made = []
    monkeypatch.setattr("hpclm.model.attention.layout.flexible", lambda *_: True)
    monkeypatch.setattr("hpclm.model.compiled.compiled", lambda function: function)
    monkeypatch.setattr(
        "hpclm.model.attention.layout.block_mask",
        lambda length, device, documents, *_: made.append((length, documents)),
    )
    stack = weights.build(
        ModelConfig.of(
            {"vocab_size": 16, "layers": 1, "hidden": 16, "attention.heads": 2, "context": 8, "positions": "alibi"}
        )
    )
    for length in (8, 8, 4, 4):
        stack.head(torch.zeros(2, length, dtype=torch.long))
    assert made == [(8, None), (4, None)]
    numbers = torch.zeros(2, 4, dtype=torch.long)
    for _ in range(2):
        stack(MicroBatch(torch.zeros(2, 4, dtype=torch.long), documents=numbers))
    assert len(made) == 4 and made[-1][1] is numbers


def test_the_frequencies_of_rotary_positions_are_made_once(monkeypatch):
    """Those of longrope are lists of the host, and a copy of them to a GPU in every micro-batch would wait for it."""
    words = [
        "model.layers=4",
        "model.positions=rope",
        "model.attention.pattern=[window,full]",
        "model.attention.window=8",
    ]
    words += [
        "model.rope.scaling={rope_type: linear, factor: 2}",
        "model.rope.window_base=500",
        "engine.precision=fp32",
    ]
    made = []

    def rates(config, rope, length, device):
        made.append(rope)
        return rotary_rates(config, rope, length, device)

    monkeypatch.setattr(layout, "rotary_rates", rates)
    run, engine, batches, _ = sharded.made(words)
    sharded.steps(run, engine, batches, 0, 2)
    assert sorted(rope.base for rope in made) == [500.0, 10000.0]


def rates(scaling, length=0):
    return frequencies(8, 100.0, scaling, 16, length, torch.device("cpu"))


def test_frequencies_fall_with_the_feature_and_scalings_change_them_as_their_authors_say():
    plain = [100.0 ** -(feature / 8) for feature in (0, 2, 4, 6)]
    found, factor = rates({})
    assert found.tolist() == pytest.approx(plain) and factor == 1.0
    linear, factor = rates({"rope_type": "linear", "factor": "4"})
    assert linear.tolist() == pytest.approx([rate / 4 for rate in plain]) and factor == 1.0
    dynamic = {"rope_type": "dynamic", "factor": "2", "original_max_position_embeddings": "16"}
    assert rates(dynamic, 16)[0].tolist() == pytest.approx(plain)
    base = 100.0 * (2 * 32 / 16 - 1) ** (8 / 6)
    assert rates(dynamic, 32)[0].tolist() == pytest.approx([base ** -(feature / 8) for feature in (0, 2, 4, 6)])
