import pytest
import torch

from hpclm import config
from hpclm.model import count
from hpclm.node import hardware
from hpclm.training import opening


def test_mfu_is_of_the_peak_of_all_processes_and_tokens_are_of_all(monkeypatch):
    monkeypatch.setattr(hardware, "peak_flops", lambda device, dtype: 1e12)
    run = config.load(None, ["model.context=128"])
    found = opening.speed_of(run, 4, torch.device("cpu"), torch.bfloat16)(samples=8, seconds=2.0)
    assert found["tokens_per_second"] == 8 * 128 / 2.0
    assert "hfu" not in found  # nothing is computed again
    assert found["mfu"] == pytest.approx(512 * count.flops_per_token(run.model) / 4e12)


@pytest.mark.parametrize("recompute, block", [("full", 2 * 12 * 8 * 8 + 2 * 4 * 8), ("selective", 2 * 4 * 8)])
def test_hfu_counts_what_is_computed_again_once_more(monkeypatch, recompute, block):
    """A block's forward pass: 2 FLOPs for each of 12 C^2 weights, and with the causal mask 2 T C for attention."""
    monkeypatch.setattr(hardware, "peak_flops", lambda device, dtype: 1e12)
    shape = "model={layers: 3, hidden: 8, heads: 2, context: 4, vocab_size: 60}"
    run = config.load(None, [shape, f"engine.recompute={recompute}"])
    found = opening.speed_of(run, 1, torch.device("cpu"), torch.bfloat16)(samples=1, seconds=1.0)
    assert found["hfu"] - found["mfu"] == pytest.approx(4 * 3 * block / 1e12)
