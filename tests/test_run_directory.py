"""A run's directory when things go wrong around it, by the command a person types."""

import os
import re
import shutil
import signal
import subprocess

import pytest

from hpclm import cli
from tests.events import began
from tests.forks import Hpclm, Ranks, hpclm
from tests.rundir.test_runs import make
from tests.runs import PATIENCE, figures, losses, until


@pytest.fixture
def tmpfs(tmp_path):
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def full(disk, left=0):
    """Fill a disk, but for ``left`` bytes."""
    room = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - left))


def read_only(disk):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


SUBMIT = ["submit", "--cluster=local", "--gpus=1"]


def test_a_disk_that_is_read_only_is_refused_at_submit_with_its_path_and_number(tiny, tmpfs):
    (tmpfs / "there").mkdir(mode=0o700)
    read_only(tmpfs)
    before = sorted(path.name for path in tmpfs.iterdir())
    for out in ("there", "missing/run"):
        done = hpclm(*SUBMIT, *tiny(), f"out={tmpfs / out}", check=64)
        assert f"run directory {tmpfs / out} cannot be written" in done.stderr and "(errno 30)" in done.stderr
    assert sorted(path.name for path in tmpfs.iterdir()) == before and not list((tmpfs / "there").iterdir())


def test_checkpoints_that_cannot_be_written_are_found_at_the_start(tiny, tmp_path, tmpfs, capsys):
    for folder in (tmpfs / "there", tmp_path / "run"):
        folder.mkdir(mode=0o700)
    (tmp_path / "run/checkpoints").symlink_to(tmpfs / "there")
    read_only(tmpfs)
    assert cli.main(["train", *tiny("run")]) == 64
    assert f"folder of checkpoints {tmp_path}/run/checkpoints cannot be written: Read-only" in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_folder_that_one_may_not_write_in_is_refused_at_submit_with_its_path_and_number(tiny, tmp_path):
    if not os.geteuid():
        pytest.skip("root may write everywhere")
    (tmp_path / "theirs").mkdir(mode=0o555)
    for out in ("theirs", "theirs/run"):
        done = hpclm(*SUBMIT, *tiny(out), check=64)
        assert f"run directory {tmp_path / out} cannot be written" in done.stderr
        assert "Permission denied (errno 13)" in done.stderr


@pytest.mark.parametrize("left", [0, 4096])
def test_a_disk_that_is_full_at_submit_leaves_one_message(left, tiny, tmpfs):
    full(tmpfs, left)
    done = hpclm(*SUBMIT, *tiny(), f"out={tmpfs / 'run'}")
    assert done.returncode and "No space left on device" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "left, background",
    [
        (65536, "true"),
        (0, "false"),
        *(pytest.param(*row, marks=pytest.mark.whole) for row in [(65536, "false"), (0, "true")]),
    ],
)
def test_a_disk_that_is_full_for_a_while_costs_saves_and_no_training(tiny, tmpfs, background, left):
    out = tmpfs / "run"
    source = ["data.source=tests.faults:filling", "budget.steps=24", f"checkpoint.background={background}"]
    source += ["log.every=1"]
    env = os.environ | {"TEST_FILL": str(tmpfs / "filler"), "TEST_LEAVES": str(left)}
    done = hpclm("train", *tiny(), f"out={out}", *source, check=0, env=env)
    said = done.stdout + done.stderr
    assert "Traceback" not in said and "Logging error" not in said, said
    failed = [
        line for line in said.splitlines() if "training continues; the checkpoints before it are untouched" in line
    ]
    # the one of step 4 may still be on its way, beside the training, when the disk fills up; 20 is after it was freed
    assert len(failed) in (3, 3 + (background == "true")), said
    assert all("MB free, but a checkpoint needs" in line or "No space left on device" in line for line in failed), (
        failed
    )
    assert said.count("metrics.jsonl cannot be written: No space left") <= 1
    assert set(losses(out)) == set(range(1, 25))
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["latest", *["step-00000004"] * (len(failed) == 3), "step-00000020", "step-00000024"]
    assert hpclm("checkpoints", out, check=0).stdout.count(" good") == len(names) - 1


def test_a_run_that_is_warned_while_the_disk_is_full_asks_to_be_started_again_from_what_it_has(tiny, tmpfs):
    out, more = tmpfs / "run", ["budget.steps=100000", "optim.schedule=constant"]
    with Hpclm("train", *tiny("x", *more), f"out={out}") as process:
        until((out / "checkpoints/step-00000004").exists, alive=process)
        full(tmpfs)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=PATIENCE)
    again = re.search(r"; the steps after (\d+) will be repeated", told)
    assert process.returncode == 85 and again, told
    (tmpfs / "filler").unlink()
    there = hpclm("train", *tiny("x", *more), f"out={out}", "stop_at=1", check=0).stderr
    assert f"resumes from step {again[1]}" in there


def test_when_every_checkpoint_is_bad_the_run_ends_with_66(tiny, tmp_path):
    hpclm("train", *tiny(), check=0)
    out = tmp_path / "run"
    for path in (out / "checkpoints").glob("step-*/rank-*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    before = (out / "metrics.jsonl").read_bytes()
    for _ in range(2):
        done = hpclm("train", *tiny(), "budget.steps=16", check=66)
        assert "no good checkpoint in" in done.stderr and "Traceback" not in done.stderr
    assert "rank-00000.safetensors differs from what was saved" in (out / "log.txt").read_text()
    assert (out / "metrics.jsonl").read_bytes() == before


def test_two_runs_on_one_directory_the_second_names_the_first_and_a_killed_one_is_followed_at_once(tiny, tmp_path):
    out = tmp_path / "run"
    words = [*tiny(), "budget.steps=100000", "checkpoint.every=5"]
    with Hpclm("train", *words) as first:
        until((out / "checkpoints/latest").exists, alive=first)
        done = hpclm("train", *words, check=75)
        assert f"(process {first.pid} on " in done.stderr and first.poll() is None
    reached = figures(out, "step", "loss")[-1][0]
    assert reached >= 5
    done = hpclm("train", *words, f"stop_at={reached + 5}", check=0)
    assert "resumes from step" in done.stdout + done.stderr
    attempts = began(out)
    assert attempts


WRONG = {
    "a folder and must be a file": ["config.yaml", "events.jsonl", "metrics.jsonl", "log.txt", "lock"],
    "a file and must be a folder": ["checkpoints", "logs", "job"],
    "a named pipe and must be a file": ["log.txt", "metrics.jsonl"],
}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in WRONG.items() for name in names])
def test_what_is_of_the_wrong_kind_is_told_before_training_and_status_goes_on(tiny, tmp_path, kind, name):
    out = make(tmp_path / "run", [{"from_step": 0, "steps": 12}], [{"step": 3, "loss": 2.5}])
    out.chmod(0o700)
    (out / name).unlink(missing_ok=True)
    {"a fo": os.mkdir, "a fi": lambda path: path.touch(), "a na": os.mkfifo}[kind[:4]](out / name)
    before = sorted(out.rglob("*"))
    wanted = f"error: {out / name} is {kind}: a run writes there; move it away, or choose another out\n"
    assert hpclm("train", *tiny(), check=64).stderr == wanted
    assert hpclm("submit", "--cluster", "local", *tiny(), check=64).stderr == wanted
    assert sorted(out.rglob("*")) == before
    assert hpclm("status", out, check=0).stderr == ""
    told = hpclm("checkpoints", out).stderr
    assert "Traceback" not in told and (name != "checkpoints" or "is a file and must be a folder" in told)


def test_of_two_ranks_both_end_with_64_and_one_says_what_is_of_the_wrong_kind(tiny, tmp_path):
    (tmp_path / "run/metrics.jsonl").mkdir(parents=True)
    with Ranks(2, tiny()) as ranks:
        ended = ranks.wait()
    assert [code for code, _ in ended.values()] == [64, 64]
    assert "".join(said for _, said in ended.values()).count("metrics.jsonl is a folder and must be a file") == 1


def test_a_step_that_would_take_longer_than_the_grace_is_left_between_two_micro_batches(tiny, tmp_path):
    words = [
        "batch.micro_size=1",
        "model.block=tests.faults:WarnedBlock",
        "checkpoint.every=0",
        "checkpoint.grace_seconds=1",
    ]
    words = [*tiny("run"), *words, "budget.steps=5", "log.every=1"]
    with Ranks(2, words, TEST_PAUSE=0.5, TEST_WARN=19) as ranks:  # twice for a micro-batch, of which there are four
        ended = ranks.wait()
    assert {code for code, _ in ended.values()} == {85}, ended
    assert "step abandoned; it will be redone" in ended[0][1]
    # on a busy machine, the second may be over
    assert "saved at step 2, exiting" in ended[0][1] or "exiting without saving" in ended[0][1], ended[0][1]
    for name in ("run", "whole"):
        with Ranks(2, [*words, f"out={tmp_path / name}"], TEST_PAUSE=0, TEST_WARN=0) as ranks:
            assert {code for code, _ in ranks.wait().values()} == {0}
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_the_settings_of_a_run_that_was_moved_or_copied_do_not_train_at_its_old_place(tiny, tmp_path, capsys):
    """A moved run would start afresh, and a copied one would go on in the original."""
    assert cli.main(["train", *tiny("old", "stop_at=2")]) == 0
    before = (tmp_path / "old/metrics.jsonl").read_bytes()
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    capsys.readouterr()
    assert cli.main(["train", f"{tmp_path}/copy/config.yaml", "stop_at=4"]) == 64
    said = capsys.readouterr().err
    assert f"copy/config.yaml belongs to the run in {tmp_path}/copy, but its out={tmp_path}/old" in said
    shutil.move(tmp_path / "old", tmp_path / "moved")
    assert cli.main(["train", f"{tmp_path}/moved/config.yaml", "stop_at=4"]) == 64
    assert not (tmp_path / "old").exists() and (tmp_path / "copy/metrics.jsonl").read_bytes() == before
    assert cli.main(["train", f"{tmp_path}/moved", "stop_at=4"]) == 0  # the ways out
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert cli.main(["train", f"{tmp_path}/link/config.yaml", "stop_at=6"]) == 0
    assert cli.main(["train", f"{tmp_path}/copy/config.yaml", "stop_at=3", f"out={tmp_path}/copy"]) == 0


def test_a_run_whose_out_is_relative_is_continued_from_another_folder_only_by_its_own_folder(
    tiny, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *tiny()[:-1], "out=run", "stop_at=2"]) == 0
    assert cli.main(["train", "run/config.yaml", "stop_at=3"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert cli.main(["train", "../run/config.yaml", "stop_at=4"]) == 64
    assert "out is relative to another folder" in capsys.readouterr().err
    assert cli.main(["train", "../run", "stop_at=4"]) == 0 and not (tmp_path / "elsewhere/run").exists()
