"""A resume with other settings says what they make of the learning rate and the batch of its first step."""

import json
import re

import pytest

from hpclm import cli
from hpclm.checkpoint import Progress
from hpclm.config import OptimConfig, Plan
from hpclm.config.plan import Length
from hpclm.optim.schedules import Schedule
from hpclm.rundir import runs
from hpclm.training import messages
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
    [line] = [
        line for line in capsys.readouterr().err.splitlines() if "settings changed since the last attempt: the " in line
    ]
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
    assert "settings changed since the last attempt: the " not in capsys.readouterr().err


SAMPLES = ["budget.steps=null", "budget.samples=160"]
RAMP = ["batch.global_size=16", "batch.rampup=[8,8,100]"]
BUDGETS = {  # what is set, what changes after step 5, and the last step and its samples
    "larger batches": ([*SAMPLES, "batch.global_size=8"], ["batch.global_size=16"], (12, 152)),
    "smaller batches": ([*SAMPLES, "batch.global_size=16"], ["batch.global_size=8"], (15, 160)),
    "in tokens": (["budget.steps=null", "budget.tokens=2560"], ["batch.global_size=16"], (12, 152)),
    "in epochs": (["budget.steps=null", "budget.epochs=0.016"], ["batch.global_size=16"], (12, 152)),
    "in steps": (["budget.steps=20"], ["batch.global_size=16"], (20, 280)),
    "a ramp given": (SAMPLES, RAMP, (16, 152)),
    "a ramp changed": ([*SAMPLES, *RAMP], ["batch.rampup=[4,12,60]"], (16, 156)),
    "a ramp removed": ([*SAMPLES, *RAMP], ["batch.rampup=null"], (12, 152)),
}


@pytest.mark.parametrize("words, changes, end", BUDGETS.values(), ids=BUDGETS.keys())
def test_a_budget_is_kept_with_other_batches(words, changes, end, tiny, tmp_path, capsys):
    words = tiny("run", *words, "optim.schedule=linear", "optim.unit=samples", "optim.warmup=1")
    assert cli.main(["train", *words, "stop_at=5"]) == 0
    assert cli.main(["train", *words, *changes]) == 0
    said = capsys.readouterr().err
    assert f"done at step {end[0]}, {end[1]} samples" in said and f"{end[0]} steps of" in said
    more = end in ((20, 280), (16, 156))  # than the order of the first attempt was made for
    assert ("The data order depends on" in said) == more
    rows = [row for row in map(json.loads, lines(tmp_path / "run/metrics.jsonl")) if "loss" in row]
    assert (rows[-1]["step"], rows[-1]["samples"]) == end
    position = end[1] - rows[-1]["batch_size"]
    assert rows[-1]["lr"] == pytest.approx(3e-3 - (3e-3 - 1e-4) * (position - 1) / (end[1] - 1))
    assert runs.read_run(tmp_path / "run").total == end[0]
    assert cli.main(["train", *words, *changes]) == 0
    assert f"done at step {end[0]}, {end[1]} samples" in capsys.readouterr().err
    assert len([row for row in map(json.loads, lines(tmp_path / "run/metrics.jsonl")) if "loss" in row]) == len(rows)


def test_the_end_follows_from_the_checkpoint_that_is_loaded_if_the_newest_is_bad(tiny, tmp_path, capsys):
    words = tiny("run", *SAMPLES)
    for changes in (["stop_at=5"], ["batch.global_size=16", "stop_at=8"]):
        assert cli.main(["train", *words, *changes]) == 0
    newest = tmp_path / "run/checkpoints/step-00000008"
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)
    assert cli.main(["train", *words, "batch.global_size=32"]) == 0
    assert "done at step 8, 136 samples" in capsys.readouterr().err


def test_what_changes_is_told_of_the_next_step_with_both_ends(caplog):
    slow = Schedule(OptimConfig(schedule="constant", lr=1e-3), Plan(1, 8, 2), Length(10, 80))
    fast = Schedule(OptimConfig(schedule="constant", lr=2e-3), Plan(1, 16, 2), Length(None, None))
    for before, now in ((slow, fast), (fast, slow), (slow, slow)):
        messages.changed_schedule(before, now, Progress(5, 40))
    begin = "settings changed since the last attempt: the learning rate of step 6"
    assert caplog.messages == [
        f"{begin} rises from 0.001 to 0.002 and the batch of step 6 changes from 8 to 16 samples; "
        "the run ends when its time is up instead of at step 10",
        f"{begin} falls from 0.002 to 0.001 and the batch of step 6 changes from 16 to 8 samples; "
        "the run ends at step 10 instead of when its time is up",
    ]


def test_a_warm_up_in_samples_goes_by_the_samples_of_the_step():
    optim = OptimConfig(schedule="constant", lr=1e-3, unit="samples", warmup=80)
    assert Schedule(optim, Plan(1, 8, 2), Length(10, 80)).rate(2, 16) == pytest.approx(1e-3 * 24 / 80)
