"""train.callbacks: what they are called with, what they request, and what follows if one raises, sleeps or is no callback."""

import json

import pytest

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.training import callbacks
from tests.forks import Ranks
from tests.runs import figures, losses

OWN = "tests.training.own_callbacks:"
FAILED = "train.callbacks: tests.training.own_callbacks:"


def named(*names):
    """The setting with these callbacks."""
    return f"train.callbacks=[{', '.join(OWN + name for name in names)}]"


def saved(out):
    """The steps of the run's checkpoints."""
    return sorted(int(path.name.partition("-")[2]) for path in (out / "checkpoints").glob("step-*"))


ENDS = {
    # callback: exit code, checkpoints, last step, what the log says; step 5 is read with step 6, after which the model is evaluated
    "Stops": (0, [6], 6, "stopped at step 6 (train.callbacks); the same command resumes it"),
    "StopsByLoss": (0, [6], 6, "stopped at step 6 (train.callbacks); the same command resumes it"),
    "Saves": (0, [6, 12], 12, "step 5: tests.training.own_callbacks:Saves requests: save"),
    "SavesByLoss": (0, [6, 12], 12, "done at step 12"),
    "Breaks": (
        93,
        [6],
        6,
        f"{FAILED}Breaks failed in after_step at step 5: RuntimeError: no; step 6 is saved; correct",
    ),
    "MayBreak": (0, [12], 12, f"{FAILED}MayBreak failed in after_step at step 5: RuntimeError: no; training continues"),
    "Exits": (93, [6], 6, f"{FAILED}Exits failed in after_step at step 5: SystemExit; step 6 is saved"),
    "Halts": (93, [6], 6, "ValueError: it returned 'halt'; it may return 'save', 'stop' or None"),
    "CannotBeMade": (93, [], 0, f"{FAILED}CannotBeMade failed in __init__: OSError: no room"),
    "MayNotBeMade": (0, [12], 12, f"{FAILED}MayNotBeMade failed in __init__: OSError: no room; training continues"),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_a_callback_requests_or_raises_decides_how_the_run_goes_on(name, tiny, tmp_path):
    code, checkpoints, step, says = ENDS[name]
    words = tiny("run", named(name, "Notes"), "checkpoint.every=0", "evaluate.every=6", "evaluate.batches=1")
    assert cli.main(["train", *words]) == code
    assert saved(tmp_path / "run") == checkpoints
    assert says in (tmp_path / "run" / "log.txt").read_text()
    assert not step or max(losses(tmp_path / "run")) == step


def test_without_other_work_a_request_takes_effect_within_three_steps(tiny, tmp_path):
    assert cli.main(["train", *tiny("run", named("Stops", "StopsByLoss"), "checkpoint.every=0")]) == 0
    assert saved(tmp_path / "run")[0] in (6, 7, 8)
    never = (
        "the run has no evaluations, so after_evaluation of tests.training.own_callbacks:StopsByLoss is never called"
    )
    assert never in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    "name, engine",
    [
        *((name, "native") for name in ("StopsByLoss", "Breaks", "CannotBeMade")),
        pytest.param("Breaks", "deepspeed", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_do_what_a_callback_of_rank_0_requests(name, engine, tiny, tmp_path):
    code, checkpoints, _, says = ENDS[name]
    words = tiny("run", named(name), "checkpoint.every=0", "evaluate.every=6", "evaluate.batches=1")
    with Ranks(2, [*words, f"engine.name={engine}"]) as ranks:
        ends = ranks.wait()
    assert [code for code, _ in ends.values()] == [code, code], ends
    assert saved(tmp_path / "run") == checkpoints
    assert says in (tmp_path / "run" / "log.txt").read_text()


def test_callbacks_get_the_numbers_of_metrics_jsonl_and_change_nothing(tiny, tmp_path):
    dropout = ("model.dropout=0.3", "evaluate.every=6", "evaluate.batches=1")
    assert cli.main(["train", *tiny("alone", *dropout)]) == 0
    assert cli.main(["train", *tiny("run", *dropout, named("Notes", "Draws", "Sleeps"))]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    notes = [json.loads(line) for line in (tmp_path / "run" / "notes.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert all(len(row.pop("data_hash")) == 16 for row in steps)  # not a number
    assert steps == [numbers for _, numbers in notes if "loss" in numbers]
    assert [numbers for _, numbers in notes if "loss" not in numbers] == [
        {"valid": row["validation_loss"]} for row in rows if "validation_loss" in row
    ]
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
    seconds = dict(figures(tmp_path / "run", "step", "callback_seconds"))
    assert seconds[6] >= 0.5 > seconds[5]
    assert "s/step in callbacks" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    "name, wrong",
    {
        "Misspelt": "has after_eval, which nothing calls; the methods are after_step and after_evaluation",
        "LacksMetrics": "has after_step, which cannot be called with self, step, metrics",
        "TakesMore": "cannot be called with out",
        "Unrelated": "is not a subclass of hpclm.training.callbacks.Callback",
        "json": "is not a class",
    }.items(),
)
def test_a_class_that_is_no_callback_is_refused_before_anything_is_written(name, wrong, tiny, tmp_path, capsys):
    with pytest.raises(ConfigError, match=wrong):
        callbacks.load([OWN + name])
    for command in (["train"], ["submit", "--cluster", "local"]):
        assert cli.main([*command, *tiny("run", named(name))]) == 64
        assert wrong in capsys.readouterr().err and not (tmp_path / "run").exists()
