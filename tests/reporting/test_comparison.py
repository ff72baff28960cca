"""What runs are called beside each other."""

from pathlib import Path

from hpclm.reporting import comparison
from hpclm.rundir import runs
from hpclm.rundir.state import state_of
from tests.reporting import made


def test_folders_of_the_same_name_are_told_apart_by_those_above_them():
    assert comparison.names([Path("/a/run"), Path("/a/other")]) == ["run", "other"]
    assert comparison.names([Path("/a/b/run"), Path("/a/c/run"), Path("/a/c/other")]) == ["b/run", "c/run", "c/other"]


def statuses(*outs):
    return [state_of(runs.read_run(out), {}) for out in outs]


def test_a_row_has_the_figures_of_a_run_and_the_settings_in_which_it_differs_the_best_first(tmp_path):
    worse = made.trained(tmp_path / "worse", [4.0, 3.5, 3.0], {3: 3.25}, lr=3e-4)
    better = made.trained(tmp_path / "better", [4.0, 3.0, 2.0], {2: 2.25, 3: 2.5})
    lines = [made.row(step, step, mine=step / 4) for step in range(1, 4)]
    (worse / "metrics.jsonl").write_text(
        made.lines([*lines, dict(step=3, time=1.0, part="valid", validation_loss=3.25)])
    )
    first, second = comparison.rows(statuses(worse, better))
    assert first == {
        "run": "better",
        "status": "ended",
        "optim.lr": 1e-3,
        "steps": 3,
        "loss": None,
        "training_loss": 3.0,
        "validation_loss": 2.25,
        "validation_step": 2,
        "bits_per_byte": None,
        "tokens_per_second": 2002.0,
        "diverged": None,
        "path": str(better),
        "mine": None,
    }
    assert (second["run"], second["optim.lr"], second["mine"]) == ("worse", 3e-4, 0.5)
    assert [*comparison.table(statuses(worse, better))] == [
        "RUN     STATE  optim.lr  VALIDATION LOSS  MEAN TRAINING LOSS  STEPS  TOKENS/S  mine",
        "better  ended  0.001     2.2500           3.0000              3      2,002     -",
        "worse   ended  0.0003    3.2500           3.9600              3      2,002     0.5",
    ]


def test_a_table_says_where_a_run_diverged_and_has_no_column_that_is_empty(tmp_path):
    good, lost = (
        made.trained(tmp_path / "good", [3.0] * 200),
        made.trained(tmp_path / "lost", [3.0] * 100 + [None] * 100),
    )
    assert [line.split() for line in comparison.table(statuses(lost, good))] == [
        ["RUN", "STATE", "MEAN", "TRAINING", "LOSS", "STEPS", "TOKENS/S"],
        ["good", "ended", "3.0000", "200", "2,176"],
        ["lost", "diverged", "at", "step", "101", "-", "200", "2,176"],
    ]
    assert [*comparison.table([])] == ["RUN  STATE"]


def test_settings_that_change_no_result_are_not_compared():
    by_run = {
        "a": {"log.every": 1, "checkpoint.every": 5, "checkpoint.init_from": "x", "seed": 1},
        "b": {"log.every": 2, "checkpoint.every": 6, "checkpoint.init_from": "y", "seed": 1, "optim.lr": 2.0},
    }
    assert comparison.differing(by_run) == {"checkpoint.init_from": {"a": "x", "b": "y"}}
