"""Which checkpoints stay when a run is not healthy."""

import json

import pytest

from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.checkpoint.directory import steps
from hpclm.checkpoint.retention import complete
from hpclm.optim.health import Health
from tests.checkpoint.state import State


def numbers(folder):
    return [int(path.name[5:]) for path in steps(folder)]


def keep(store, words):
    """Save what the words say: 10 is a healthy step, 20s15 one in a spike since step 15, 30x5 one after 5 skipped steps."""
    for word in words.split():
        step, _, since = word.partition("s")
        step, _, skipped = step.partition("x")
        health = Health(3.0, 3.0, 0.1, int(since) if since else None, int(skipped or 0))
        store.save(State(), Progress(int(step), health=health))


@pytest.mark.parametrize(
    "saves, left",
    [
        ("10 20 30 40", [20, 30, 40]),
        ("10 20 30 40s35 50s35 60s35 70s35 80s35", [10, 20, 30, 70, 80]),
        ("10 20 30 40x3 50x13 60x23", [10, 20, 30, 50, 60]),
        ("10 20 30 40s35 50 60", [30, 50, 60]),  # it came back
        ("10 20 30 40s35 50 60 70", [50, 60, 70]),
        ("10 20 30 40s31 50s31 60s31", [10, 20, 50, 60]),  # what step 30 left made step 31 spike
        ("10 20 30 40s5 50s5", [40, 50]),  # nothing was healthy
        ("1 2 3 4s4 5s4 6s4 7s4", [1, 2, 6, 7]),
        ("10 20s15 30 40s35 50", [10, 30, 40, 50]),
    ],
)
def test_what_is_not_healthy_pushes_nothing_out_that_is(saves, left, tmp_path):
    keep(CheckpointStore(tmp_path, Retention(3), {}), saves)
    assert numbers(tmp_path) == left


def test_with_a_save_at_every_step_the_last_healthy_one_stays(tmp_path):
    keep(CheckpointStore(tmp_path, Retention(2), {}), "1 2 3 4 5s5 6s5 7s5 8s5")
    assert numbers(tmp_path) == [3, 7, 8]


def test_a_checkpoint_of_before_there_was_a_record_counts_as_healthy(tmp_path):
    store = CheckpointStore(tmp_path, Retention(2), {})
    store.save(State(), Progress(1))
    [folder] = steps(tmp_path)
    manifest = complete(folder)
    del manifest.progress["health"]
    manifest.write(folder)
    state = State()
    assert CheckpointStore(tmp_path, Retention(2), {}).resume(state, "auto") == Progress(1)
    keep(store, "2s2 3s2 4s2")
    assert numbers(tmp_path) == [3, 4]  # of step 1 the loss of step 2 says that it was none to go back to
    assert (
        json.loads((tmp_path / "step-00000004/MANIFEST.json").read_text())["progress"]["health"]["spiking_since"] == 2
    )
