"""A branch goes on as its trunk does, until a setting differs, and neither touches the other."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hpclm import cli
from hpclm.rundir import events
from tests import traced
from tests.checkpoint import victims
from tests.forks import hpclm

TINY = [
    *(
        "debug",
        "model.layers=1",
        "model.hidden=16",
        "model.attention.heads=2",
        "model.context=16",
        "cluster.preflight=false",
    ),
    *("batch.global_size=2", "batch.micro_size=2", "checkpoint.every=2", "evaluate.every=0", "engine.device=cpu"),
]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """A run of eight steps, with checkpoints at 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("trunk")
    hpclm("train", *TINY, "out=a", "budget.steps=8", cwd=folder, check=0)
    return folder / "a"


def branch(trunk, target, *words, check=0):
    return hpclm("branch", trunk, target, *words, check=check)


def losses(run):
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def content(run):
    return {path.name: path.read_bytes() for path in (run / "checkpoints").glob("step-*/*")}


def test_it_goes_on_bit_for_bit_and_the_trunk_is_left_alone(trunk, tmp_path):
    before = content(trunk)
    said = branch(trunk, tmp_path / "b", "--at", "4").stdout
    assert "goes on from step 4" in said and "hpclm train" in said
    shared = tmp_path / "b/checkpoints/step-00000004/MANIFEST.json"
    assert shared.stat().st_ino == (trunk / "checkpoints/step-00000004/MANIFEST.json").stat().st_ino
    hpclm("train", tmp_path / "b", check=0)
    assert losses(tmp_path / "b") == {step: loss for step, loss in losses(trunk).items() if step > 4}
    assert content(trunk) == before
    assert "a branch of" in hpclm("checkpoints", tmp_path / "b", check=0).stdout


def test_another_schedule_changes_the_branch_only(trunk, tmp_path):
    branch(trunk, tmp_path / "b", "--at", "4", "optim.lr=1e-4", "optim.min_lr=0", "budget.steps=6")
    hpclm("train", tmp_path / "b", check=0)
    changed = losses(tmp_path / "b")
    assert sorted(changed) == [5, 6] and changed[5] == losses(trunk)[5] and changed[6] != losses(trunk)[6]


def test_what_is_pruned_or_damaged_in_one_run_stays_in_the_other(trunk, tmp_path):
    branch(trunk, tmp_path / "b", "checkpoint.keep_last=2", "budget.steps=14")
    whole = content(trunk)
    hpclm("train", tmp_path / "b", check=0)
    assert not (tmp_path / "b/checkpoints/step-00000008").exists() and content(trunk) == whole


@pytest.mark.parametrize(
    "words, said",
    [
        (["--at", "3"], "has no checkpoint of step 3; it has 4, 6, 8"),
        (["model.layers=2"], "model.layers: a branch has the network, data and seed of its trunk"),
        (["seed=5", "model.norm_eps=1e-4"], "model.norm_eps, seed: a branch has"),
        (["nonsense=1"], "unknown setting nonsense"),
    ],
)
def test_what_it_cannot_be_is_refused_and_nothing_is_written(words, said, trunk, tmp_path):
    assert said in branch(trunk, tmp_path / "b", *words, check=64).stderr
    assert not list(tmp_path.iterdir())


def test_a_target_that_exists_and_a_trunk_without_checkpoints_are_refused(trunk, tmp_path):
    (tmp_path / "b").mkdir()
    assert "b exists" in branch(trunk, tmp_path / "b", check=64).stderr
    (tmp_path / "empty").mkdir(mode=0o700)
    (tmp_path / "empty/config.yaml").write_text("")
    assert "has no checkpoint; it has none" in branch(tmp_path / "empty", tmp_path / "c", check=64).stderr


def test_files_on_another_disk_are_copied(trunk, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    assert cli.main(["branch", str(trunk), str(tmp_path / "b"), "--at", "4"]) == 0
    there = Path(tmp_path / "b/checkpoints/step-00000004")
    assert {path.name for path in there.iterdir()} == {
        path.name for path in (trunk / "checkpoints" / there.name).iterdir()
    }
    [begun] = events.of_kind(events.read_events(tmp_path / "b"), "branched")
    assert (begun["trunk"], begun["step"]) == (str(trunk), 4)


def weights(run):
    return {name: text for name, text in content(run).items() if name.endswith(".safetensors")}


@pytest.mark.whole
@pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace here")
@pytest.mark.parametrize("work", [victims.branch, victims.average])
def test_a_kill_at_any_system_call_leaves_nothing_half_done(work, trunk, tmp_path):
    whole = content(trunk)
    target = tmp_path / "here/b"
    points = traced.points(work, trunk, target)
    assert len(points) > 10
    made = weights(target)
    for call, number, line in points:
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
        outcome = traced.run(work, trunk, target, inject=f"{call}:signal=KILL:when={number}")
        assert outcome.code == -9, (line, outcome)
        if target.exists():
            assert weights(target) == made, line
            shutil.rmtree(target)
        assert traced.run(work, trunk, target).answer, line
        assert weights(target) == made and [path.name for path in target.parent.iterdir()] == ["b"], line
    assert content(trunk) == whole
