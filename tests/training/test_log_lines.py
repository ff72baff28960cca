"""Log lines of steps and evaluations."""

import json
import math

from hpclm import cli
from hpclm.training import log_lines


def test_lines_of_steps_hold_the_run_s_numbers(tiny, tmp_path):
    words = ["log.every=4", "evaluate.every=6", "evaluate.batches=1", "budget.steps=20", "budget.samples=100"]
    assert cli.main(["train", *tiny("run", *words)]) == 0
    lines = (tmp_path / "run/log.txt").read_text().splitlines()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert "; 12 steps (budget.samples=100 ends it before budget.steps=20) of 8 samples x 16 tokens" in lines[1]
    told = [line[26:] for line in lines if "/12  loss " in line]
    assert [int(line.split()[1].partition("/")[0]) for line in told] == [1, 4, 8, 12]
    assert [" left" in line for line in told] == [False, True, True, True]  # the first step may compile
    assert told[2].startswith(f"step 8/12  loss {sum(losses[n] for n in range(5, 9)) / 4:.4f}  lr ")


def test_the_perplexity_of_a_loss_that_is_not_finite_hides_nothing():
    assert math.isnan(log_lines.perplexity(math.nan))
    assert log_lines.perplexity(math.inf) == log_lines.perplexity(1e9) == math.exp(20)
    assert log_lines.perplexity(2.0) == math.exp(2.0)
