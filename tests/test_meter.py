import pytest

from hpclm import config
from hpclm.model import count
from hpclm.training.metrics import Speed


def test_mfu_is_of_the_peak_of_all_processes_and_tokens_are_of_all():
    run = config.load(None, ["model.context=128"])
    found = Speed(run.model, run.engine.recompute, 4e12)(samples=8, seconds=2.0)
    assert found["tokens_per_second"] == 8 * 128 / 2.0
    assert "hfu" not in found  # nothing is computed again
    assert found["mfu"] == pytest.approx(512 * count.flops_per_token(run.model) / 4e12)


@pytest.mark.parametrize("recompute, block", [("full", 2 * 12 * 8 * 8 + 2 * 4 * 8), ("selective", 2 * 4 * 8)])
def test_hfu_counts_what_is_computed_again_once_more(recompute, block):
    """A block's forward pass: 2 FLOPs for each of 12 C^2 weights, and with the causal mask 2 T C for attention."""
    shape = "model={layers: 3, hidden: 8, heads: 2, context: 4, vocab_size: 60}"
    run = config.load(None, [shape, f"engine.recompute={recompute}"])
    found = Speed(run.model, run.engine.recompute, 1e12)(samples=1, seconds=1.0)
    assert found["hfu"] - found["mfu"] == pytest.approx(4 * 3 * block / 1e12)
