"""profile.steps: a trace of these steps, and what they spent their time on."""

import json

import pytest

from hpclm import cli
from tests.runs import losses


def test_the_steps_that_were_asked_for_are_traced_and_the_run_stays_the_same(tiny, tmp_path):
    assert cli.main(["train", *tiny("plain", "budget.steps=6")]) == 0
    assert cli.main(["train", *tiny("run", "budget.steps=6", "profile.steps=[3,4]")]) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    trace = json.loads((tmp_path / "run/profile/rank-00000.json").read_text())
    names = [each.get("name", "") for each in trace["traceEvents"]]
    assert names.count("aten::embedding") >= 4  # two steps of two micro-batches
    assert sum("Optimizer" in name or "adam" in name.lower() for name in names) >= 2
    table = (tmp_path / "run/profile/rank-00000.txt").read_text()
    head, *rows = [line for line in table.splitlines() if line and not line.startswith("---")]
    assert "Self CPU" in head and sum(row.lstrip().startswith(("aten::", "autograd::")) for row in rows) >= 5
    assert len([row for row in rows if "time total" not in row]) == 10
    log = (tmp_path / "run/log.txt").read_text()
    assert "profile of steps 3 to 4" in log and not (tmp_path / "plain/profile").exists()


def test_a_run_that_ends_before_the_last_of_them_writes_what_it_has(tiny, tmp_path):
    assert cli.main(["train", *tiny("run", "budget.steps=3", "profile.steps=[3,50]")]) == 0
    assert (tmp_path / "run/profile/rank-00000.json").exists()


@pytest.mark.parametrize("steps", ["[0,3]", "[5,4]", "[1,5000]", "[3]", "3"])
def test_steps_that_cannot_be_are_refused(steps, tiny, tmp_path, capsys):
    assert cli.main(["train", *tiny("run", f"profile.steps={steps}")]) == 64
    assert "profile.steps" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_trace_that_cannot_be_written_ends_no_run(tiny, tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run/events.jsonl").touch()
    (tmp_path / "run/profile").write_text("in the way")
    assert cli.main(["train", *tiny("run", "budget.steps=3", "profile.steps=[2,2]")]) == 0
    assert "cannot be written" in (tmp_path / "run/log.txt").read_text()
