"""What is said of a run's checkpoints."""

import re

import pytest

from hpclm import cli
from hpclm.base.errors import HpclmError, NoCheckpointError
from hpclm.checkpoint import CheckpointStore, Retention, listing
from tests.checkpoint import state
from tests.checkpoint.test_retention import keep
from tests.rundir.test_runs import make


def test_the_way_back_from_a_spike_leads_to_the_newest_healthy_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path / "run/checkpoints", Retention(9), {})
    told = []
    for word in ("10", "20", "30", "40s35", "50s35", "60"):
        keep(store, word)
        told.append(listing.to_go_back(store.folder, [*listing.rows(store.folder, verify=False)]))
    back = f"to go back to the newest healthy one: hpclm resume {tmp_path / 'run'} --from 30"
    assert told == ["", "", "", back, back, ""]


def test_a_run_without_a_good_checkpoint_is_listed_and_ends_with_66(tmp_path, capsys):
    made = state.saved(make(tmp_path / "run") / "checkpoints", [2])
    assert cli.main(["checkpoints", str(tmp_path / "run")]) == 0
    assert "step-00000002" in capsys.readouterr().out
    (made.folder / "step-00000002/MANIFEST.json").write_text("{")
    assert cli.main(["checkpoints", str(tmp_path / "run")]) == 66
    said = capsys.readouterr()
    assert re.search(r"^step-00000002 +bad ", said.out)
    assert said.err == f"error: no good checkpoint in {made.folder}\n"


def test_a_checkpoint_whose_next_step_began_a_spike_is_not_healthy_and_says_why(tmp_path):
    store = CheckpointStore(tmp_path, Retention(9), {})
    keep(store, "20 30 40s31")
    rows = list(listing.rows(tmp_path, verify=False))
    assert [row["healthy"] for row in rows] == [True, False, False]
    assert rows[1]["health"] == "the loss spiked in the next step" and rows[0]["health"] == ""


def test_what_was_set_aside_is_listed_with_the_reason(tmp_path):
    for name in (".rolled-back-step-00000002", ".bad-step-00000001", ".trash-step-00000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "REASON.txt").write_text(f"of {name}\n")
    assert [listing.line(row) for row in listing.rows(tmp_path, verify=False)] == [
        f"{name:<28}set aside  of {name}" for name in (".bad-step-00000001", ".rolled-back-step-00000002")
    ]


def test_a_line_has_the_size_the_engine_and_why_it_was_saved():
    row = {"name": "step-00000010", "state": "good", "reason": "", "bytes": 2_500_000, "files": 2, "health": ""}
    row |= {"time": "2026-01-02", "validation_loss": 1.25, "engine": "native", "processes": 4, "why": "SIGTERM"}
    told = "2.5 MB in 2 files  2026-01-02  native on 4 processes  validation loss 1.2500  saved on SIGTERM"
    assert listing.line(row) == f"{'step-00000010':<28}good       {told}"
    row |= {"files": 1, "processes": 1, "why": None, "validation_loss": None, "health": "of a spike"}
    assert listing.line(row).endswith("2.5 MB in 1 file  2026-01-02  native on 1 process  of a spike")
    assert listing.line({**row, "engine": None}).endswith("2026-01-02  imported  of a spike")


def test_without_a_checkpoint_that_can_be_loaded_it_is_said_whether_the_disk_may_be_the_reason(tmp_path):
    bad, unreadable = {"state": "bad", "reason": "x"}, {"state": "unreadable", "reason": "y"}
    listing.check_usable(tmp_path, [bad, {"state": "complete"}])
    with pytest.raises(HpclmError, match="cannot be read now: y"):
        listing.check_usable(tmp_path, [bad, unreadable])
    with pytest.raises(NoCheckpointError, match="no good checkpoint in"):
        listing.check_usable(tmp_path, [bad, {"state": "set aside"}])
