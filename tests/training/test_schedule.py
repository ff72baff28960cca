"""A resume with other settings says what they make of the learning rate and the batch of its first step."""

import json
import re

import pytest

from hpclm import cli
from tests.runs import lines

CHANGES = {
    "a longer budget": (
        ["budget.steps=40"],
        r"rises from ([\d.e-]+) to ([\d.e-]+); the run ends at step 40 instead of at step 12",
    ),
    "a longer decay": (
        ["budget.steps=13", "optim.schedule_length=100"],
        r"rises from ([\d.e-]+) to ([\d.e-]+); the run ends",
    ),
    "another schedule": (["stop_at=10", "optim.schedule=linear"], r"(?:rises|falls) from ([\d.e-]+) to ([\d.e-]+)$"),
    "another peak": (["stop_at=10", "optim.lr=2e-3"], r"falls from ([\d.e-]+) to ([\d.e-]+)$"),
    "a longer warm-up": (
        ["stop_at=10", "optim.warmup=20", "optim.schedule_length=30"],
        r"from ([\d.e-]+) to ([\d.e-]+)$",
    ),
    "larger batches": (["stop_at=10", "batch.global_size=16"], r"batch of step 9 changes from (8) to (16) samples"),
}
SAME = {
    "nothing": ["stop_at=10"],
    "the evaluation": ["stop_at=10", "evaluate.every=2", "evaluate.batches=1"],
    "a constant rate": ["budget.steps=40", "stop_at=10"],
}


@pytest.mark.parametrize("changes, said", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_the_schedule_is_said_with_both_numbers(changes, said, tiny, tmp_path, capsys):
    assert cli.main(["train", *tiny("run", "stop_at=8")]) == 0
    capsys.readouterr()
    assert cli.main(["train", *tiny("run", *changes)]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "settings of the last attempt replaced" in line]
    before, after = map(float, re.search(said, line).groups())
    assert before != after
    rows = [json.loads(line) for line in lines(tmp_path / "run/metrics.jsonl")]
    [first] = [row for row in rows if row["step"] == 9 and "loss" in row]
    assert after == pytest.approx(first["batch_size" if "batch of" in said else "lr"], rel=1e-3)


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME.keys())
def test_nothing_is_said_where_the_schedule_stays(changes, tiny, capsys):
    constant = ["optim.schedule=constant"] if "budget.steps=40" in changes else []
    assert cli.main(["train", *tiny("run", *constant, "stop_at=8")]) == 0
    assert cli.main(["train", *tiny("run", *constant, *changes)]) == 0
    assert "settings of the last attempt replaced" not in capsys.readouterr().err
