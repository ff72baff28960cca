"""A branch goes on as its trunk does, until a setting differs, and neither touches the other."""

import json
import os
import re
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from hpclm import cli
from hpclm.config import RunConfig
from hpclm.reporting import charts, history
from hpclm.rundir import events
from tests import traced
from tests.checkpoint import victims
from tests.forks import Ranks, hpclm
from tests.runs import ROOT

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


def branch(trunk, target, *words, check=0, **more):
    return hpclm("branch", trunk, target, *words, check=check, **more)


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


def test_another_schedule_changes_the_branch_only(trunk, tmp_path):
    branch(trunk, tmp_path / "b", "--at", "4", "optim.lr=1e-4", "optim.min_lr=0", "budget.steps=6")
    hpclm("train", tmp_path / "b", check=0)
    changed = losses(tmp_path / "b")
    assert sorted(changed) == [5, 6] and changed[5] == losses(trunk)[5] and changed[6] != losses(trunk)[6]


def test_another_batch_and_layout_go_on_as_the_trunk_would_with_them(trunk, tmp_path):
    changes = ["batch.global_size=4", "parallel.tensor=2", "budget.steps=10"]
    branch(trunk, tmp_path / "b", *changes)
    shutil.copytree(trunk, tmp_path / "a")
    for name, words in (("b", []), ("a", [f"out={tmp_path / 'a'}", *changes])):
        [code] = {process.wait() for process in Ranks(2, [tmp_path / name, *words]).processes.values()}
        assert code == 0
    after = losses(tmp_path / "b")
    assert sorted(after) == [9, 10] and after == {step: losses(tmp_path / "a")[step] for step in after}


@pytest.fixture
def own(trunk, tmp_path):
    """A copy of the trunk, which a test may change."""
    return Path(shutil.copytree(trunk, tmp_path / "a"))


def replace(file, text=b"damaged"):
    """Damage a file of one run only: hard links share their content."""
    file.unlink()
    file.write_bytes(text)


def test_what_is_pruned_in_a_branch_stays_in_the_trunk(trunk, tmp_path):
    branch(trunk, tmp_path / "b", "checkpoint.keep_last=2", "budget.steps=14")
    whole = content(trunk)
    hpclm("train", tmp_path / "b", check=0)
    assert not (tmp_path / "b/checkpoints/step-00000008").exists() and content(trunk) == whole


def test_a_checkpoint_set_aside_in_one_run_stays_in_the_other(own, tmp_path):
    branch(own, tmp_path / "b", "budget.steps=10")
    branch(own, tmp_path / "c", "budget.steps=10")
    replace(tmp_path / "b/checkpoints/step-00000008/rank-00000.safetensors")
    whole = content(own)
    assert "no good checkpoint" in hpclm("train", tmp_path / "b", check=66).stderr
    assert (tmp_path / "b/checkpoints/.bad-step-00000008/REASON.txt").exists() and content(own) == whole
    replace(own / "checkpoints/step-00000008/rank-00000.safetensors")
    hpclm("train", own, "budget.steps=10", check=0)
    assert (own / "checkpoints/.bad-step-00000008/REASON.txt").exists()
    hpclm("train", tmp_path / "c", check=0)
    assert losses(tmp_path / "c") == {step: loss for step, loss in losses(own).items() if step > 8}


def test_a_roll_back_in_one_run_leaves_the_other_alone(own, tmp_path):
    branch(own, tmp_path / "b", "budget.steps=10")
    hpclm("train", own, "--from", "4", "budget.steps=10", check=0)
    whole = content(own)
    assert (own / "checkpoints/.rolled-back-step-00000008/REASON.txt").exists()
    assert sorted(path.name for path in (tmp_path / "b/checkpoints/step-00000008").iterdir()) == [
        "MANIFEST.json",
        "rank-00000.safetensors",
    ]
    hpclm("train", tmp_path / "b", check=0)
    hpclm("train", tmp_path / "b", "--from", "8", "budget.steps=11", check=0)
    assert content(own) == whole
    assert losses(tmp_path / "b") == {step: loss for step, loss in losses(own).items() if step > 8} | {
        11: losses(tmp_path / "b")[11]
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_files_of_another_user_are_copied(own, tmp_path):
    for path in (own, *own.rglob("*")):
        os.chown(path, 12345, 12345)
    branch(own, tmp_path / "b", "budget.steps=10")
    for file in (own / "checkpoints/step-00000008").iterdir():
        copy = tmp_path / "b/checkpoints/step-00000008" / file.name
        assert copy.read_bytes() == file.read_bytes() and (copy.stat().st_uid, copy.stat().st_nlink) == (0, 1)
    shutil.rmtree(own)
    hpclm("train", tmp_path / "b", check=0)
    assert sorted(losses(tmp_path / "b")) == [9, 10]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize(
    "closed",
    [
        "config.yaml",
        "checkpoints",
        "checkpoints/step-00000008",
        "checkpoints/step-00000008/MANIFEST.json",
        "checkpoints/step-00000008/rank-00000.safetensors",
        "tokenizer",
        "tokenizer/vocab.json",
        "",
    ],
)
def test_a_trunk_that_this_user_cannot_read_is_refused_and_nothing_is_written(closed, own, tmp_path, capsys):
    assert cli.main(["branch", str(own), str(tmp_path / "warm")]) == 0  # what the other user may not be able to import
    (own / "tokenizer").mkdir()
    (own / "tokenizer/vocab.json").write_text("{}")
    for path in (own, *own.rglob("*"), *own.parents):
        path.chmod(path.stat().st_mode | 0o055)
    (own / closed).chmod(0o700 if (own / closed).is_dir() else 0o600)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    capsys.readouterr()
    os.seteuid(12345)
    try:
        code = cli.main(["branch", str(own), str(tmp_path / "theirs/b")])
    finally:
        os.seteuid(0)
    said = capsys.readouterr().err
    assert code == 64 and "Permission denied" in said and len(said.splitlines()) == 1 and str(own) in said
    assert not list((tmp_path / "theirs").iterdir())


def test_the_tree_is_shown(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    branch("a", "b", "--at", "4", "budget.steps=6", cwd=tmp_path)
    hpclm("train", "b", check=0, cwd=tmp_path)
    branch("b", "0", cwd=tmp_path)
    table = hpclm("status", "--runs", ".", check=0, cwd=tmp_path).stdout.splitlines()
    assert [line.partition(" ")[0] or line.split()[0] for line in table] == ["RUN", "a", "b", "0"]
    assert table[2].startswith("  b ") and "branch of a at step 4 · done" in table[2]
    assert table[3].startswith("    0 ") and table[3].endswith("branch of b at step 6")
    [shown] = json.loads(hpclm("status", "b", "--runs", ".", "--json", check=0, cwd=tmp_path).stdout)
    assert shown["trunk"] == {"run": str(own), "step": 4}
    branch_of = f"branch of {own} at step 4"
    assert branch_of in hpclm("checkpoints", "b", check=0, cwd=tmp_path).stdout.splitlines()
    assert f"branch of   {own} at step 4" in hpclm("status", "b", check=0, cwd=tmp_path).stdout.splitlines()
    hpclm("report", "a", "b", "-o", "both.html", check=0, cwd=tmp_path)
    assert "Branch of a at step 4<" in Path("both.html").read_text()
    shutil.move(own, tmp_path / "moved")
    gone = f"{branch_of}, which is no longer there"
    assert gone in hpclm("checkpoints", "b", check=0, cwd=tmp_path).stdout.splitlines()
    assert gone in hpclm("status", "--runs", ".", check=0, cwd=tmp_path).stdout
    hpclm("train", "b", "budget.steps=7", check=0, cwd=tmp_path)
    hpclm("report", "b", "--no-png", check=0, cwd=tmp_path)
    assert f"<p>B{gone[1:]}.</p>" in Path("b/report.html").read_text()


def test_the_curves_of_a_branch_begin_at_its_step(trunk, tmp_path):
    branch(trunk, tmp_path / "b", "--at", "4", "budget.steps=6")
    hpclm("train", tmp_path / "b", check=0)
    runs = {path.name: history.read_history(path) for path in (trunk, tmp_path / "b")}
    [loss] = [chart for chart in charts.charts(runs) if chart.title.startswith("Training loss")]
    assert {curve.name: curve.steps[0] for curve in loss.curves} == {"a": 1, "b": 5}


STAYS = {"network": "model.layers=2", "`data`": "data.workers=3", "`seed`": "seed=5", "`optim.name`": "optim.name=muon"}
MAY_DIFFER = [
    *("model.dropout=0.1", "batch.global_size=4", "budget.steps=11", "optim.clip=0.5", "parallel.tensor=2"),
    *("engine.precision=fp16 scaler.window=500", "engine.name=fairscale", "evaluate.every=2", "checkpoint.every=3"),
    *(
        "train.callbacks=[my.module:Class]",
        "log.every=3",
        "profile.steps=[2,3]",
        "job.nodes=2",
        "cluster.hang_minutes=3",
    ),
]


def test_the_settings_that_may_differ_are_those_that_the_page_says(trunk, tmp_path):
    page = " ".join((ROOT / "docs/commands.md").read_text().split())
    stays = re.search("The (.*?), (.*?), (.*?) and (.*?) stay; all other settings may differ", page).groups()
    assert stays == tuple(STAYS)
    for word in STAYS.values():
        said = branch(trunk, tmp_path / "b", word, check=64).stderr
        assert f"error: {word.partition('=')[0]} was " in said and len(said.splitlines()) == 2
    assert not list(tmp_path.iterdir())
    sections = {field.name for field in fields(RunConfig) if is_dataclass(getattr(RunConfig(), field.name))}
    assert {word.partition(".")[0] for words in MAY_DIFFER for word in words.split()} == sections - {"data"}
    for number, words in enumerate(MAY_DIFFER):
        branch(trunk, tmp_path / f"{number}", *words.split())


@pytest.mark.parametrize(
    "words, said",
    [
        (["--at", "3"], "has no checkpoint of step 3; it has 4, 6, 8"),
        (["model.layers=2"], "a branch has the network, data, seed and optimizer of its trunk"),
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
