"""What a run says of its experts: figures of each layer in metrics.jsonl, the tokens of each expert in experts.jsonl."""

import json
import math
import shutil

import numpy as np
import pytest

from hpclm import config
from hpclm.rundir import metrics_file, summary
from hpclm.training.expert_load import RESOLUTION, ExpertLoad
from tests.forks import Ranks, hpclm
from tests.runs import lines

SHAPE = [
    "model.layers=3",
    "model.experts.count=4",
    "model.experts.per_token=2",
    "model.experts.pattern=[dense,experts,experts]",
]
WORDS = [*SHAPE, "model.experts.ffn=16", "engine.precision=fp32", "log.every=2", "batch.micro_size=1"]
LAYOUTS = {
    "experts on two": (2, ["parallel.expert=2"]),
    "two stages": (2, ["parallel.pipeline=2", "engine.name=pipelining"]),
}


def model():
    return config.load(None, SHAPE).model


def rows_of(path):
    return [json.loads(line) for line in lines(path)]


def plain_figures(counts):
    """Of the tokens of each expert of a layer, by the definitions in docs/report.md."""
    shares = [count / sum(counts) for count in counts]
    entropy = sum(-share * math.log(share) for share in shares if share)
    return max(counts) * len(counts) / sum(counts), entropy / math.log(len(counts)), counts.count(0)


@pytest.fixture
def load(tmp_path):
    """Has the steps of runs logged every other step, with the tokens that a function of the step gives."""

    def logged(tokens, steps):
        experts, figures = ExpertLoad(tmp_path, model(), lambda: True), []
        for step in range(1, steps + 1):
            given = tokens(step)
            experts.step(None if given is None else np.array(given, float).ravel())
            if step % 2 == 0:
                figures.append(experts.logged({"step": step, "time": 1.0}, last=step == steps))
        experts.close()
        return figures

    return logged


def test_figures_are_of_all_steps_since_the_last_log_line(load, tmp_path):
    tokens = {
        1: [[9, 0, 0, 3], [1, 1, 1, 1]],
        2: [[0, 5, 0, 3], [1, 1, 1, 1]],
        3: None,
        4: [[2, 2, 2, 2], [0, 0, 0, 8]],
    }
    figures = load(tokens.get, 4)
    for line, sums in zip(figures, ([[9, 5, 0, 6], [2, 2, 2, 2]], [[2, 2, 2, 2], [0, 0, 0, 8]]), strict=True):
        for block, counts in zip(("block1", "block2"), sums, strict=True):
            measured = [line[f"{name}/{block}"] for name in ("expert_load_max", "expert_entropy", "dead_experts")]
            assert measured == pytest.approx(plain_figures(counts))
    assert [(row["step"], row["steps"], row["tokens"]) for row in rows_of(tmp_path / "experts.jsonl")] == [
        (2, 2, {"block1": [9, 5, 0, 6], "block2": [2, 2, 2, 2]}),
        (4, 2, {"block1": [2, 2, 2, 2], "block2": [0, 0, 0, 8]}),
    ]


def test_steps_without_tokens_have_no_figures_and_no_line(load, tmp_path):
    assert load(lambda step: None, 4) == [{}, {}]
    assert not (tmp_path / "experts.jsonl").exists()


def test_an_attempt_that_no_longer_holds_the_run_directory_writes_no_tokens(tmp_path):
    experts = ExpertLoad(tmp_path, model(), lambda: False)
    experts.step(np.full(8, 1.0))
    experts.logged({"step": 1, "time": 1.0}, last=True)
    experts.close()
    assert not (tmp_path / "experts.jsonl").exists()


def test_a_long_run_has_a_line_for_every_thousandth_of_its_steps(tmp_path):
    experts, steps = ExpertLoad(tmp_path, model(), lambda: True), 5 * RESOLUTION
    for step in range(1, steps + 1):
        experts.step(np.full(8, float(step)))
        if step % 2 == 0:
            experts.logged({"step": step, "time": 1.0}, last=step == steps)
    experts.close()
    rows = rows_of(tmp_path / "experts.jsonl")
    assert RESOLUTION < len(rows) < 2 * RESOLUTION and rows[-1]["step"] == steps
    assert sum(row["steps"] for row in rows) == steps
    assert sum(row["tokens"]["block1"][0] for row in rows) == steps * (steps + 1) // 2


@pytest.mark.parametrize(
    "value, valid",
    [
        ({"block1": [1, 0]}, True),
        ({"block1": [1, 0], "block2": [3, 4]}, True),
        ({"block1": [1, 0], "block2": [3]}, False),
        *(
            (value, False)
            for value in ({}, [], {"a": []}, {"a": [True]}, {"a": [-1]}, {"a": [1.5]}, {"a": [1 << 60]}, {"a": 3})
        ),
    ],
)
def test_only_counts_for_each_expert_are_read(value, valid):
    assert metrics_file.are_counts(value) == valid


def train(size, out, *words):
    shape = "model={hidden: 16, context: 16, vocab_size: 64, attention: {heads: 2}}"
    words = [shape, "data.source=synthetic", "batch.global_size=4", f"out={out}", *WORDS, *words]
    words += ["cluster.preflight=false", "cluster.self_check=false", "evaluate.every=0", "checkpoint.every=4"]
    with Ranks(size, words) as ranks:
        assert [code for code, _ in ranks.wait().values()] == [0] * size


def test_a_run_has_the_load_of_its_experts_and_goes_on_with_it_in_every_layout(tmp_path):
    out = tmp_path / "run"
    train(1, out, "budget.steps=8")
    steps = [row for row in rows_of(out / "metrics.jsonl") if "loss" in row]
    lines_of_experts = rows_of(out / "experts.jsonl")
    assert [(row["step"], row["steps"]) for row in lines_of_experts] == [(2, 2), (4, 2), (6, 2), (8, 2)]
    for row in lines_of_experts:
        assert [*row["tokens"]] == ["block1", "block2"]
        assert all(
            sum(counts) == 2 * 4 * 16 * 2 for counts in row["tokens"].values()
        )  # steps, samples, tokens, experts
        for block, counts in row["tokens"].items():
            logged = steps[row["step"] - 1]
            measured = [logged[f"{name}/{block}"] for name in ("expert_load_max", "expert_entropy", "dead_experts")]
            assert measured == pytest.approx(plain_figures(counts))
    assert not any("expert_entropy/block1" in row for row in steps if row["step"] % 2)
    train(1, tmp_path / "half", "budget.steps=8", "stop_at=4")
    with (tmp_path / "half/experts.jsonl").open("a") as file:  # as a run that was killed after step 6
        file.write('{"step": 6, "steps": 2, "time": 1.0, "tokens": {"block1": [1, 2, 3, 4]}}\n')
    for name, (size, words) in LAYOUTS.items():
        again = tmp_path / name.replace(" ", "-")
        shutil.copytree(tmp_path / "half", again)
        train(size, again, "budget.steps=8", *words)
        resumed = rows_of(again / "experts.jsonl")
        assert [row | {"time": 0} for row in resumed] == [row | {"time": 0} for row in lines_of_experts], name


def test_a_run_without_experts_has_no_file_and_no_figures_of_them(tiny, tmp_path):
    hpclm("train", *tiny("plain"), check=0)
    assert not (tmp_path / "plain/experts.jsonl").exists()
    assert not any("expert" in name for row in rows_of(tmp_path / "plain/metrics.jsonl") for name in row)
    assert "experts" not in summary.read_summary(tmp_path / "plain")
