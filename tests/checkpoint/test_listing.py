"""What is said of a run's checkpoints."""

from hpclm.checkpoint import CheckpointStore, Retention, listing
from tests.checkpoint.test_retention import keep


def test_the_way_back_from_a_spike_leads_to_the_newest_healthy_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path / "run/checkpoints", Retention(9), {})
    told = []
    for word in ("10", "20", "30", "40s35", "50s35", "60"):
        keep(store, word)
        told.append(listing.to_go_back(store.folder, [*listing.rows(store.folder, verify=False)]))
    back = f"to go back to the newest healthy one: hpclm resume {tmp_path / 'run'} --from 30"
    assert told == ["", "", "", back, back, ""]
