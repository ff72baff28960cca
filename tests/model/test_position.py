import math

import pytest
import torch

from hpclm.config import ModelConfig
from hpclm.model.position import alibi, sinusoids
from tests import weights


def test_the_sinusoidal_table_is_fairseqs():
    table = sinusoids(6, 8)
    for row in range(6):
        for column in range(4):
            angle = (row + 2) * math.exp(-column * math.log(10000) / 3)
            assert table[row, column].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[row, 4 + column].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_embeddings_are_scaled_as_fairseq_does():
    tokens = torch.arange(5)[None]
    plain, scaled = (
        weights.build(ModelConfig(vocab_size=16, layers=1, hidden=16, heads=2, embed_scale=scale)).layers["tokens"](
            tokens
        )
        for scale in (False, True)
    )
    assert torch.allclose(scaled, plain * 4.0)


def test_alibi_slopes_are_the_papers():
    assert (-alibi(8, 2, torch.device("cpu"))[0, :, 1, 0]).tolist() == [2.0**-i for i in range(1, 9)]
