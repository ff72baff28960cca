"""Metrics: the figures and lines of steps; and the thread that writes them, in order, complete where it must be."""

import json
import logging
import math
import os
import re
import threading
import time
from pathlib import Path

import pytest

from hpclm import cli, config
from hpclm.checkpoint import Progress
from hpclm.checkpoint import store as stores
from hpclm.model import count
from hpclm.training import metrics
from hpclm.training.metrics import Meter, Speed, WriterThread, evaluation_line, perplexity, step_line
from tests.runs import lines, until


def test_mfu_is_of_the_peak_of_all_processes_and_tokens_are_of_all():
    run = config.load(None, ["model.context=128"])
    found = Speed(run.model, run.engine, 4e12)(samples=8, seconds=2.0)
    assert found["tokens_per_second"] == 8 * 128 / 2.0
    assert "hfu" not in found  # nothing is computed again
    assert found["mfu"] == pytest.approx(512 * count.flops_per_token(run.model) / 4e12)


def test_the_peak_of_fp8_is_that_of_a_gpu_that_does_its_products_in_half_the_time():
    """Of 3 blocks the second is in FP8: of 6 FLOPs a weight, 12 C^2 of them, 4 take half as long."""
    shape = "model={layers: 3, hidden: 32, context: 4, vocab_size: 60, attention: {heads: 2}}"
    plain, fp8 = (config.load(None, [shape, *more]) for more in ([], ["engine.fp8=rowwise"]))
    rates = [Speed(run.model, run.engine, 1e12)(samples=1, seconds=1.0)["mfu"] for run in (plain, fp8)]
    assert rates[1] == pytest.approx(rates[0] - 4 * (4 * 12 * 32 * 32 / 2) / 1e12)


@pytest.mark.parametrize("recompute, block", [("full", 2 * 12 * 8 * 8 + 2 * 4 * 8), ("selective", 2 * 4 * 8)])
def test_hfu_counts_what_is_computed_again_once_more(recompute, block):
    """A block's forward pass: 2 FLOPs for each of 12 C^2 weights, and with the causal mask 2 T C for attention."""
    shape = "model={layers: 3, hidden: 8, context: 4, vocab_size: 60, attention: {heads: 2}}"
    run = config.load(None, [shape, f"engine.recompute={recompute}"])
    found = Speed(run.model, run.engine, 1e12)(samples=1, seconds=1.0)
    assert found["hfu"] - found["mfu"] == pytest.approx(4 * 3 * block / 1e12)


class Summary:
    """Only takes notes."""

    def __init__(self):
        self.steps = []

    def resume(self, rows):
        list(rows)

    def tick(self):
        pass

    def is_mine(self):
        return True

    def measured(self, row):
        self.steps.append(row["step"])


def test_log_lines_are_means_since_the_last_one_and_steps_without_a_loss_are_warned_of_once(tmp_path, caplog):
    run = config.load(None, ["model.context=10", "log={every: 3, tensorboard: false}"])
    summary = Summary()
    steps = {1: 9.0, 2: 2.0, 3: 4.0, 4: 5.0, 5: math.nan, 6: math.nan}
    with (
        caplog.at_level(logging.INFO),
        Meter(tmp_path, run.log, Progress(), 6, Speed(run.model, run.engine, None), summary) as meter,
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
        "step 3/6  mean loss 3.0000  lr 0.1  400 tokens/s  25% waiting for data  0.500 s/step  0:01 left",
        "step 6/6  mean loss 5.0000 (2 of 3 steps without a token that counts)  lr 0.1  800 tokens/s  50% waiting for data  "
        "0.500 s/step  0:00 left",
    ]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.partition(":")[0] for text in warned] == ["step 2", "step 5 has no loss"]
    assert "step 2: the loss mask excludes every token of 2 micro-batches of one replica" in warned[0]
    assert summary.steps == [*steps] and len(meter.path.read_text().splitlines()) == 6


def test_lines_of_steps_hold_the_run_s_numbers(tiny, tmp_path):
    words = ["log.every=4", "evaluate.every=6", "evaluate.batches=1", "budget.steps=20", "budget.samples=100"]
    assert cli.main(["train", *tiny("run", *words)]) == 0
    lines = (tmp_path / "run/log.txt").read_text().splitlines()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert "; 12 steps (budget.samples=100 ends the run before budget.steps=20) of 8 samples x 16 tokens" in lines[1]
    told = [line[26:] for line in lines if re.search(r"/12  (mean )?loss ", line)]
    assert [int(line.split()[1].partition("/")[0]) for line in told] == [1, 4, 8, 12]
    assert [" left" in line for line in told] == [False, True, True, True]  # the first step may compile
    assert told[2].startswith(f"step 8/12  mean loss {sum(losses[n] for n in range(5, 9)) / 4:.4f}  lr ")


def test_the_perplexity_of_a_loss_that_is_not_finite_hides_nothing():
    assert math.isnan(perplexity(math.nan))
    assert perplexity(math.inf) == perplexity(1e9) == math.exp(20)
    assert perplexity(2.0) == math.exp(2.0)


MEAN = {"step": 40, "loss": 2.0, "lr": 3e-3, "tokens_per_second": 1234.6, "step_seconds": 0.5, "data_fraction": 0.05}
FIGURES = "mean loss 2.0000  lr 0.003  1,235 tokens/s"


@pytest.mark.parametrize(
    "more, total, first, line",
    [
        ({}, None, False, f"step 40  {FIGURES}  0.500 s/step"),
        ({}, 7240, False, f"step 40/7240  {FIGURES}  0.500 s/step  1:00:00 left"),
        ({}, 158, False, f"step 40/158  {FIGURES}  0.500 s/step  0:59 left"),
        ({}, 158, True, f"step 40/158  {FIGURES}  0.500 s/step"),
        ({"mfu": 0.456}, None, False, f"step 40  {FIGURES}  MFU 45.6%  0.500 s/step"),
        ({"data_fraction": 0.061}, None, False, f"step 40  {FIGURES}  6% waiting for data  0.500 s/step"),
        ({"counted_tokens": 0}, None, False, f"step 40  no loss{FIGURES[16:]}  0.500 s/step"),
        (
            {"callback_seconds": 0.1},
            None,
            False,
            f"step 40  {FIGURES}  0.100 s/step in callbacks  0.500 s/step",
        ),
    ],
)
def test_a_line_has_the_figures_and_how_long_the_rest_takes(more, total, first, line):
    assert step_line([{}] * 10, {**MEAN, **more}, total, first) == line


def test_steps_in_which_no_token_counts_are_counted_in_the_line():
    rows = [{"counted_tokens": 0}] * 2 + [{}] * 8
    line = step_line(rows, MEAN, None)
    assert line.startswith("step 40  mean loss 2.0000 (2 of 10 steps without a token that counts)  lr 0.003")


def test_the_line_of_an_evaluation_says_of_which_data_it_is():
    assert evaluation_line(7, 2.0, "") == "step 7  validation loss 2.0000  perplexity 7.39"
    assert evaluation_line(7, 2.0, "", 0.75) == "step 7  validation loss 2.0000  perplexity 7.39  bits per byte 0.7500"
    assert evaluation_line(7, 2.0, "law") == "step 7  validation loss of law 2.0000  perplexity 7.39"


def test_work_is_done_in_order_by_another_thread_and_flush_waits_for_it():
    done = []

    def work(number):
        time.sleep(0.001)
        done.append((number, threading.current_thread().name))

    with WriterThread() as write:
        for number in range(20):
            write(lambda number=number: work(number))
        write.flush()
        assert done == [(number, "metrics") for number in range(20)]
        write(lambda: work(20))
    assert done[-1][0] == 20


def test_more_work_than_may_wait_waits(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_QUEUED", 2)
    door, given = threading.Event(), []
    with WriterThread() as write:

        def give():
            for number in range(5):
                write(door.wait)
                given.append(number)

        giver = threading.Thread(target=give)
        giver.start()
        until(lambda: len(given) == 3, "the third piece of work")
        giver.join(0.3)
        assert len(given) == 3  # one that is done, and two that wait
        door.set()
        giver.join()


@pytest.mark.parametrize("told", ["call", "flush", "end"])
def test_an_error_reaches_the_thread_that_gave_the_work(told):
    done = []
    with pytest.raises(ZeroDivisionError), WriterThread() as write:
        write(lambda: 1 / 0)
        write(lambda: done.append(1))
        if told == "flush":
            write.flush()
        while told == "call":
            write(lambda: done.append(2))
    assert not done


def test_an_error_of_the_block_is_not_hidden():
    with pytest.raises(KeyError), WriterThread() as write:
        write(lambda: 1 / 0)
        raise KeyError


def test_an_error_of_the_thread_ends_the_run(tiny, tmp_path, monkeypatch, capsys):
    def broken(rows, *_, **more):
        raise RuntimeError(f"no words for step {rows[-1]['step']}")

    monkeypatch.setattr(metrics, "step_line", broken)
    assert cli.main(["train", *tiny("run", "checkpoint.every=0")]) not in (0, 85)
    assert "RuntimeError: no words for step 1" in capsys.readouterr().err
    assert len(lines(tmp_path / "run/metrics.jsonl")) < 12


@pytest.mark.parametrize("background", ["true", "false"])
def test_all_steps_of_a_checkpoint_are_on_the_disk_before_it_is_there(background, tiny, tmp_path, monkeypatch):
    """With a thread that is slow to write them."""
    write, publish, found = metrics.Meter._write, stores.directory.publish, {}
    synced = []
    fsync = os.fsync

    def slow(self, row, *more):
        time.sleep(0.02)
        write(self, row, *more)

    def looked_at(staged, final):
        steps = [json.loads(line)["step"] for line in lines(tmp_path / "run/metrics.jsonl")]
        found[int(final.name[5:])] = steps, synced[-1]
        publish(staged, final)

    def noted(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.name == "metrics.jsonl":
            synced.append(len(lines(tmp_path / "run/metrics.jsonl")))
        fsync(handle)

    monkeypatch.setattr(metrics.Meter, "_write", slow)
    monkeypatch.setattr(stores.directory, "publish", looked_at)
    monkeypatch.setattr(os, "fsync", noted)
    words = tiny("run", "checkpoint.every=3", f"checkpoint.background={background}", "evaluate.every=0")
    assert cli.main(["train", *words]) == 0
    assert found.keys() == {3, 6, 9, 12}
    for step, (steps, there) in found.items():
        assert steps[:step] == list(range(1, step + 1)) and there >= step
