"""What is said of a run's checkpoints."""

import re

from hpclm import cli
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
