"""Steps, micro-batches and held-out data in which the loss mask lets no token count: they have no loss, and not one of 0."""

import json
import math

import numpy as np
import pytest
import torch

from hpclm.config import OptimConfig
from hpclm.data.indexed import IndexedDataset
from hpclm.engine.outliers import SkipStep
from hpclm.engine.step import GlobalNorm
from hpclm.parallel.mesh import Compute, Mesh
from hpclm.preprocess.writer import Writer
from hpclm.rundir import summary
from tests.forks import hpclm

COUNTING = [0, 3, 6, 8]
"""Of nine samples, one document each, those with tokens that count; the last three are held out."""
SHAPE = "model={layers: 1, hidden: 16, context: 16, vocab_size: 64, attention: {heads: 2}}"
WORDS = [SHAPE, "data.order=packed", "data.split=6,3", "batch.micro_size=1", "log.tensorboard=false", "log.every=3"]
WORDS += ["engine.precision=fp32", "cluster.preflight=false", "evaluate.batches=1", "optim.guard=skip_step"]


def dataset(folder, counting):
    draw = np.random.default_rng(0)
    with Writer(folder / "x", "u1") as tokens, Writer(folder / "x_loss", "u1") as mask:
        for number in range(9):
            tokens.add_document(draw.integers(0, 64, 17))
            mask.add_document(np.where(np.arange(17) > 9, number in counting, 0).astype("u1"))
    return f"data.prefix={folder / 'x'}"


def train(folder, name, *words, counting=COUNTING):
    out = folder / name
    done = hpclm("train", f"out={out}", dataset(folder, counting), *WORDS, *words, check=0)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return done.stdout + done.stderr, [row for row in rows if "loss" in row], rows


def test_a_step_without_a_token_that_counts_has_no_loss(tmp_path):
    said, steps, _ = train(tmp_path, "run", "batch.global_size=1", "budget.steps=6", "evaluate.every=0")
    without = [row["step"] for row in steps if row.get("counted_tokens") == 0]
    assert len(without) == 4 and all(row["loss"] is None for row in steps if row["step"] in without)
    losses = {row["step"]: row["loss"] for row in steps if row["loss"] is not None}
    assert len(losses) == 2 and min(losses.values()) > 1
    assert said.count(f"step {without[0]} has no loss") == 1 and said.count(" has no loss") == 1
    for last in (3, 6):  # the lines after the first step's
        line = next(line for line in said.splitlines() if f"step {last}/6" in line)
        steps_of_line = range(2, 4) if last == 3 else range(4, 7)
        known = [losses[step] for step in steps_of_line if step in losses]
        expected = f"loss {sum(known) / len(known):.4f}" if known else "no loss"
        count = f"({sum(step in without for step in steps_of_line)} of {len(steps_of_line)} steps without a token that counts)"
        assert f"{expected} {count}" in line
    assert summary.read_summary(tmp_path / "run")["loss"] == losses[max(losses)]
    page = hpclm("report", tmp_path / "run", "--output", tmp_path / "page.html", check=0)
    assert (tmp_path / "page.html").exists(), page.stdout
    resumed = hpclm("train", f"out={tmp_path / 'run'}", dataset(tmp_path, COUNTING), *WORDS, "batch.global_size=1",
                    "evaluate.every=0", "budget.steps=7", "stop_at=7", "data.split=6,3")  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr


def test_empty_micro_batches_lower_the_mean_of_means_as_in_megatron_and_are_counted(tmp_path):
    words = ["batch.global_size=6", "budget.steps=1", "evaluate.every=0"]
    said, [row], _ = train(tmp_path, "means", *words, "batch.loss_norm=microbatch")
    assert row["empty_micro_batches"] == 4 and "every token of 4 micro-batches of one replica" in said
    said, [tokens], _ = train(tmp_path, "tokens", *words)
    assert "empty_micro_batches" not in tokens and "micro-batches of one replica" not in said
    assert row["loss"] == pytest.approx(tokens["loss"] * 2 / 6, rel=1e-6)  # both samples that count have 7 tokens


def test_held_out_data_without_a_token_that_counts_are_not_measured(tmp_path):
    words = ["batch.global_size=1", "budget.steps=2", "evaluate.every=1"]
    said, _, rows = train(tmp_path, "run", *words, counting=[0, 3, 7])
    assert not any("validation_loss" in row for row in rows)
    assert (
        said.count("valid skipped: the loss mask excludes every token of the 1 samples read; increase evaluate.batches")
        == 1
    )
    refused = hpclm("evaluate", tmp_path / "run", "--samples", 1, check=64).stderr
    assert "the loss mask excludes every token of the 1 samples of valid" in refused


def test_a_dataset_is_evaluated_by_its_loss_mask(tmp_path):
    train(tmp_path, "run", "batch.global_size=1", "budget.steps=1", "evaluate.every=0")

    def evaluated(*words):
        words = ["evaluate", tmp_path / "run", "--data", tmp_path / "x", "--json", *words]
        return json.loads(hpclm(*words, check=0).stdout)

    assert len(IndexedDataset(tmp_path / "x")) == 9
    masked, whole = evaluated(), evaluated("data.loss_mask=ignore")
    assert (masked["tokens"], whole["tokens"]) == (7 * len(COUNTING), 9 * 16)
    assert masked["loss_mask"] == str(tmp_path / "x_loss") and "loss_mask" not in whole
    parts = [
        json.loads(hpclm("evaluate", tmp_path / "run", "--part", part, "--json", check=0).stdout)
        for part in ("train", "valid")
    ]
    assert masked["loss"] == pytest.approx(sum(part["loss"] for part in parts) / 2, rel=1e-5)  # of two samples each
    assert masked["loss"] != pytest.approx(whole["loss"], rel=1e-4)


def test_a_step_without_tokens_does_not_enter_what_the_guard_compares_with():
    guard = SkipStep(GlobalNorm([], Compute(torch.device("cpu"), torch.float32, Mesh()), False), torch.device("cpu"))
    assert OptimConfig(guard="skip_step").guard == guard.name
    for counted in (5.0, 0.0):
        guard.counted = torch.tensor(counted)
        with guard.around(torch.tensor(counted), torch.tensor(counted), torch.tensor(0.0)):
            pass
    assert guard.window[-2:, 0].tolist()[0] == 5.0 and math.isnan(guard.window[-1, 0])
