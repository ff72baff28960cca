"""Log lines of steps and evaluations."""

import json
import math

import pytest

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


MEAN = {"step": 40, "loss": 2.0, "lr": 3e-3, "tokens_per_second": 1234.6, "data_fraction": 0.05}
FIGURES = "loss 2.0000  lr 0.003  1,235 tokens/s"


@pytest.mark.parametrize(
    "more, total, first, line",
    [
        ({}, None, False, f"step 40  {FIGURES}  0.500 s/step"),
        ({}, 7240, False, f"step 40/7240  {FIGURES}  0.500 s/step  1:00:00 left"),
        ({}, 158, False, f"step 40/158  {FIGURES}  0.500 s/step  0:59 left"),
        ({}, 158, True, f"step 40/158  {FIGURES}  0.500 s/step"),
        ({"mfu": 0.456}, None, False, f"step 40  {FIGURES}  MFU 45.6%  0.500 s/step"),
        ({"data_fraction": 0.061}, None, False, f"step 40  {FIGURES}  6% waiting for data  0.500 s/step"),
        ({"counted_tokens": 0}, None, False, f"step 40  no loss{FIGURES[11:]}  0.500 s/step"),
    ],
)
def test_a_line_has_the_figures_and_how_long_the_rest_takes(more, total, first, line):
    assert log_lines.step_line(log_lines.Interval([{}] * 10, {**MEAN, **more}, 5.0, total, first)) == line


def test_steps_in_which_no_token_counts_are_counted_in_the_line():
    rows = [{"counted_tokens": 0}] * 2 + [{}] * 8
    line = log_lines.step_line(log_lines.Interval(rows, MEAN, 5.0, None))
    assert line.startswith("step 40  loss 2.0000 (2 of 10 steps without a token that counts)  lr 0.003")


def test_the_line_of_an_evaluation_says_of_which_data_it_is():
    assert log_lines.evaluation_line(7, 2.0, "") == "step 7  validation loss 2.0000  perplexity 7.39"
    assert log_lines.evaluation_line(7, 2.0, "law") == "step 7  validation loss of law 2.0000  perplexity 7.39"
