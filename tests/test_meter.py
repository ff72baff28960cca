import logging
import math

import pytest

from hpclm import config
from hpclm.model import count
from hpclm.training.metrics import Meter, NullMeter, Speed


def test_mfu_is_of_the_peak_of_all_processes_and_tokens_are_of_all():
    run = config.load(None, ["model.context=128"])
    found = Speed(run.model, run.engine, 4e12)(samples=8, seconds=2.0)
    assert found["tokens_per_second"] == 8 * 128 / 2.0
    assert "hfu" not in found  # nothing is computed again
    assert found["mfu"] == pytest.approx(512 * count.flops_per_token(run.model) / 4e12)


def test_the_peak_of_fp8_is_that_of_a_gpu_that_does_its_products_in_half_the_time():
    """Of 3 blocks the second is in FP8: of 6 FLOPs a weight, 12 C^2 of them, 4 take half as long."""
    shape = "model={layers: 3, hidden: 32, heads: 2, context: 4, vocab_size: 60}"
    plain, fp8 = (config.load(None, [shape, *more]) for more in ([], ["engine.fp8=rowwise"]))
    rates = [Speed(run.model, run.engine, 1e12)(samples=1, seconds=1.0)["mfu"] for run in (plain, fp8)]
    assert rates[1] == pytest.approx(rates[0] - 4 * (4 * 12 * 32 * 32 / 2) / 1e12)


@pytest.mark.parametrize("recompute, block", [("full", 2 * 12 * 8 * 8 + 2 * 4 * 8), ("selective", 2 * 4 * 8)])
def test_hfu_counts_what_is_computed_again_once_more(recompute, block):
    """A block's forward pass: 2 FLOPs for each of 12 C^2 weights, and with the causal mask 2 T C for attention."""
    shape = "model={layers: 3, hidden: 8, heads: 2, context: 4, vocab_size: 60}"
    run = config.load(None, [shape, f"engine.recompute={recompute}"])
    found = Speed(run.model, run.engine, 1e12)(samples=1, seconds=1.0)
    assert found["hfu"] - found["mfu"] == pytest.approx(4 * 3 * block / 1e12)


@pytest.mark.parametrize(
    "losses, mean",
    [
        ({(5, "valid"): 2.5, (4, "valid"): 9.0}, 2.5),
        ({(5, "valid/a"): 1.0, (5, "valid/b"): 3.0, (5, "valid/c"): None}, 2.0),
        ({(5, "valid/a"): 1.0, (5, "valid/b"): float("inf")}, None),
        ({(4, "valid"): 9.0}, None),
    ],
)
def test_the_loss_of_several_parts_is_their_mean_where_all_are_finite(losses, mean):
    assert NullMeter(losses).validation(5) == mean


class Summary:
    """Only takes notes."""

    def __init__(self):
        self.steps = []

    def resume(self, rows):
        list(rows)

    def tick(self):
        pass

    def measured(self, row):
        self.steps.append(row["step"])


def test_log_lines_are_means_since_the_last_one_and_steps_without_a_loss_are_warned_of_once(tmp_path, caplog):
    run = config.load(None, ["model.context=10", "log={every: 3, tensorboard: false}"])
    summary = Summary()
    steps = {1: 9.0, 2: 2.0, 3: 4.0, 4: 5.0, 5: math.nan, 6: math.nan}
    with (
        caplog.at_level(logging.INFO),
        Meter(tmp_path, run.log, (0, 0), 6, Speed(run.model, run.engine, None), summary) as meter,
    ):
        for step, loss in steps.items():
            measured = {
                "batch_size": 8 * step,
                "step_seconds": 0.5,
                "data_seconds": 0.05 * step,
                "loss": loss,
                "lr": 0.1,
            }
            measured |= {"counted_tokens": 0} if math.isnan(loss) else {}
            measured |= {"empty_micro_batches": step} if step in (2, 3) else {}
            meter.step(step, 8 * step, measured)
        meter.flush()
    told = [text for text in caplog.messages if text.startswith("step ") and " tokens/s" in text]
    assert told == [
        "step 1/6  loss 9.0000  lr 0.1  160 tokens/s  10% waiting for data  0.500 s/step",
        "step 3/6  loss 3.0000  lr 0.1  400 tokens/s  25% waiting for data  0.500 s/step  0:01 left",
        "step 6/6  loss 5.0000 (2 of 3 steps without a token that counts)  lr 0.1  800 tokens/s  50% waiting for data  "
        "0.500 s/step  0:00 left",
    ]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.partition(":")[0] for text in warned] == ["step 2", "step 5 has no loss"]
    assert "step 2: 2 of the micro-batches of one replica have no token that counts in the loss" in warned[0]
    assert summary.steps == [*steps] and len(meter.path.read_text().splitlines()) == 6
