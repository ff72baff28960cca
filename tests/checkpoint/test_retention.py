"""Which checkpoints stay."""

from pathlib import Path

import pytest

from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.checkpoint.directory import checked, steps
from hpclm.checkpoint.manifest import Manifest
from hpclm.optim.stability import Health
from tests.checkpoint.state import State


def numbers(folder):
    return [int(path.name[5:]) for path in steps(folder)]


def keep(store, words):
    """Save what the words say: 10 is a healthy step, 20s15 one in a spike since step 15, 30x5 one after 5 skipped steps, 40! one
    that was saved because the run had to exit, 50=2.5 one with that validation loss."""
    for number, word in enumerate(words.split(), 1):
        word, _, validation = word.partition("=")
        why, word = "SIGTERM" if word.endswith("!") else None, word.strip("!")
        step, _, since = word.partition("s")
        step, _, skipped = step.partition("x")
        health = Health(3.0, 3.0, 0.1, int(since) if since else None, int(skipped or 0))
        store.begin(State(), Progress(int(step), health=health), float(validation) if validation else None, False, why)
        store.commit()
        assert len(steps(store.folder)) >= min(2, number)


@pytest.mark.parametrize(
    "last, saves, left",
    [
        (3, "10 20 30 40", [20, 30, 40]),
        (3, "10 20 30 40s35 50s35 60s35 70s35 80s35", [10, 20, 30, 70, 80]),
        (3, "10 20 30 40x3 50x13 60x23", [10, 20, 30, 50, 60]),
        (3, "10 20 30 40s35 50 60", [30, 50, 60]),  # it came back
        (3, "10 20 30 40s35 50 60 70", [50, 60, 70]),
        (3, "10 20 30 40s31 50s31 60s31", [10, 20, 50, 60]),  # what step 30 left made step 31 spike
        (3, "10 20 30 40s5 50s5", [40, 50]),  # nothing was healthy
        (3, "1 2 3 4s4 5s4 6s4 7s4", [1, 2, 6, 7]),
        (2, "1 2 3 4 5s5 6s5 7s5 8s5", [3, 7, 8]),
        (3, "10 20s15 30 40s35 50", [10, 30, 40, 50]),
        (2, "1000 2000 2300! 2600! 2900!", [1000, 2000, 2900]),  # preempted again and again
        (2, "1000 2000 2300! 2600! 2900! 3000", [2000, 3000]),
        (2, "1000 2000 3000 3300!", [2000, 3000, 3300]),
        (2, "100! 200! 300!", [200, 300]),
        (2, "100! 200! 1000", [200, 1000]),
        (2, "100! 200! 1000 1100!", [1000, 1100]),
        (2, "100! 1000 2000", [1000, 2000]),
        (2, "1=3 2=1 3=2 4 5=2.5 6=4", [2, 5, 6]),
        (1, "1 2 3", [2, 3]),  # never fewer than two
    ],
)
def test_what_is_kept(last, saves, left, tmp_path):
    keep(CheckpointStore(tmp_path, Retention(last, best="=" in saves), {}), saves)
    assert numbers(tmp_path) == left


def test_one_that_is_not_complete_is_not_counted_among_those_that_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, Retention(2), {})
    keep(store, "1 2")
    (tmp_path / "step-00000002/rank-00000.safetensors").unlink()
    keep(store, "3")
    assert numbers(tmp_path) == [1, 3]
    (tmp_path / "step-00000001/MANIFEST.json").write_text("{}")
    keep(store, "4")
    assert numbers(tmp_path) == [3, 4] and (tmp_path / ".bad-step-00000001").is_dir()


def test_a_checkpoint_from_before_health_was_recorded_counts_as_healthy_and_regular(tmp_path):
    store = CheckpointStore(tmp_path, Retention(2), {})
    store.save(State(), Progress(1))
    [folder] = steps(tmp_path)
    manifest = checked(folder)
    del manifest.progress["health"], manifest.made["why"]
    manifest.write(folder)
    assert CheckpointStore(tmp_path, Retention(2), {}).resume(State(), "auto") == Progress(1)
    assert checked(folder).why is None
    keep(store, "2s2 3s2 4s2")
    assert numbers(tmp_path) == [3, 4]  # of step 1 the loss of step 2 says that it was none to go back to
    assert checked(steps(tmp_path)[-1]).health.spiking_since == 2


@pytest.mark.parametrize(
    "retention, left",
    [
        (Retention(2), [10, 11]),
        (Retention(2, every=4), [4, 8, 10, 11]),
        (Retention(2, passes=1, samples=30), [9, 10, 11]),
        (Retention(2, passes=2, samples=30), [6, 9, 10, 11]),
        (Retention(2, passes=9, samples=30), [3, 6, 9, 10, 11]),  # step 1 ends none
        (Retention(2, best=1), [7, 10, 11]),
        (Retention(2, best=2), [5, 7, 10, 11]),
    ],
    ids=str,
)
def test_regular_steps_ends_of_epochs_and_the_best_stay_besides_the_newest(retention, left):
    losses = {3: 2.0, 5: 1.0, 7: 1.0}  # of two that are alike, the newer one is better
    complete = [
        (Path(f"step-{step:08d}"), Manifest({"step": step, "samples": 10 * step}, {}, {}, {}, {}, {}, losses.get(step)))
        for step in range(1, 12)
    ]
    pruned = {int(path.name[5:]) for path in retention.prunable(complete)}
    assert [step for step in range(1, 12) if step not in pruned] == left
