"""Run directories in which somebody has put something else than hpclm: nothing waits, nothing is followed, nothing steers a terminal."""

import contextlib
import logging
import os
import socket
import tempfile
from pathlib import Path

import pytest

from hpclm import cli, config
from hpclm.base import files, folders
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.base.log import also_to, instead_to
from hpclm.checkpoint import directory
from hpclm.checkpoint import manifest as manifests
from hpclm.distributed.bootstrap import World
from hpclm.launch import process
from hpclm.node.job import OwnJob
from hpclm.rundir import events, folder, lease, rows, runs
from hpclm.rundir.lease import Lease
from hpclm.rundir.logs import last
from hpclm.rundir.metrics_file import forget_after
from hpclm.training import records
from hpclm.training.start import RunStart
from tests import forks
from tests.checkpoint import state
from tests.rundir.test_runs import make
from tests.test_status import attempt
from tests.test_trust import NOBODY, given_away

ROOT = Path(__file__).parents[1]
KINDS = ("pipe", "device", "folder", "socket", "loop")


def put(path, kind):
    """Something at ``path`` that is not a regular file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        short = Path(f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}")  # a socket's name has 108 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(short / path.name))
        os.close(int(short.name))
    else:
        path.symlink_to(path.name)


READERS = {
    "config.yaml": [lambda out: config.load(out / "config.yaml"), lambda out: config.of_run(out, [])],
    "events.jsonl": [
        runs.read_run,
        events.read_events,
        lambda out: records.check_progress(out, 0, OwnJob("Slurm", "7")),
    ],
    "metrics.jsonl": [lambda out: list(forget_after(out, 1))],
    "log.txt": [lambda out: rows.tail(out / "log.txt"), lambda out: last(out / "log.txt", 1)],
    "summary.json": [runs.read_run],
    "lock": [lease.holder, lease.refuse_if_held],
    "checkpoints/step-00000001/MANIFEST.json": [
        lambda out: manifests.read_manifest(out / "checkpoints/step-00000001"),
        lambda out: folder.survey_checkpoints(out / "checkpoints"),
        lambda out: directory.newest(out / "checkpoints"),
    ],
    "checkpoints/.bad-step-00000001/REASON.txt": [lambda out: cli.main(["checkpoints", str(out)])],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_not_waited_for_nor_read(name, kind, tmp_path):
    forks.call(read, name, kind, tmp_path / "run")


def read(name, kind, out):
    """Let all that reads ``name`` of a run read something else. What waits for a pipe, or reads a device to its end, would
    do so for ever: it runs in a process that can be killed."""
    for reader in READERS[name]:
        put(out / name, kind) if not os.path.lexists(out / name) else None
        with contextlib.suppress(HpclmError, OSError, manifests.BadCheckpoint):
            reader(out)


@pytest.mark.parametrize("kind", KINDS)
def test_status_shows_a_run_whose_files_are_none_and_the_others(kind, tmp_path):
    for name in (*folder.FILES, "checkpoints/step-00000001/MANIFEST.json", "logs/job-1.log"):
        if not (kind == "loop" and name in folder.MARKS):
            put(tmp_path / "strange" / name, kind)
    (tmp_path / "strange" / "config.yaml").exists() or (tmp_path / "strange" / "config.yaml").touch()
    make(tmp_path / "usual", [attempt()], ended=("done", "done at step 20, 80 samples", 0))
    shown = forks.hpclm("status", "--runs", tmp_path, check=0).stdout
    assert f"{tmp_path}/strange" in shown and "done at step 20" in shown
    assert f"{tmp_path}/strange" in forks.hpclm("status", tmp_path / "strange", check=0).stdout


WRITERS = {
    "events.jsonl": lambda path: events.append(path.parent, "cancelled", by="me"),
    "lock": lambda path: Lease(path.parent).__enter__(),
    "lock.beat": lambda path: files.overwrite(path, "x"),
    "checkpoints.saved": lambda path: directory.mark(path.with_name("checkpoints")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_through_a_link(name, tmp_path):
    target, path = tmp_path / "mine.txt", tmp_path / "run" / name
    target.write_text("mine")
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    with pytest.raises((OSError, HpclmError), match="is a link; links are not followed here"):
        WRITERS[name](path)
    assert target.read_text() == "mine"
    target.unlink()
    with pytest.raises((OSError, HpclmError)):
        WRITERS[name](path)
    assert not target.exists()


def test_a_log_is_not_written_through_a_link(tmp_path, caplog):
    target, path, rank = tmp_path / "mine.txt", tmp_path / "log.txt", tmp_path / "rank-00001.log"
    target.write_text("mine")
    path.symlink_to(target)
    rank.symlink_to(target)
    with also_to(path):
        instead_to(rank)
        logging.getLogger("hpclm").warning("a line")
    for each in (path, rank):
        assert f"{each} cannot be written: is a link; links are not followed here; training continues" in caplog.text
    assert target.read_text() == "mine" and path.is_symlink()


def test_a_reason_is_not_written_through_a_link(tmp_path):
    step = state.saved(tmp_path / "checkpoints", (1,)).folder / "step-00000001"
    (tmp_path / "mine.txt").write_text("mine")
    (step / "REASON.txt").symlink_to(tmp_path / "mine.txt")
    directory.set_aside(step, "it is bad")
    assert (tmp_path / "mine.txt").read_text() == "mine" and not step.exists()


SPOILT = {
    "a link for a log": lambda out: (out / "log.txt").symlink_to(out / "elsewhere"),
    "a link for metrics": lambda out: (out / "metrics.jsonl").symlink_to(out / "elsewhere"),
    "a link for settings": lambda out: (out / "config.yaml").symlink_to(out / "elsewhere"),
    "a link for a lock": lambda out: (out / "lock").symlink_to(out / "elsewhere"),
    "a pipe for events": lambda out: os.mkfifo(out / "events.jsonl"),
    "a device for events": lambda out: (out / "events.jsonl").symlink_to("/dev/zero"),
    "open checkpoints": lambda out: (out / "checkpoints").mkdir() or (out / "checkpoints").chmod(0o777),
    "checkpoints of a group": lambda out: (out / "checkpoints").mkdir() or (out / "checkpoints").chmod(0o770),
    "open checkpoints elsewhere": lambda out: (
        (out / "open").mkdir() or (out / "open").chmod(0o777) or (out / "checkpoints").symlink_to(out / "open")
    ),
    "an open directory": lambda out: out.chmod(0o777),
    "a directory of a group": lambda out: out.chmod(0o770),
    "another's checkpoints": lambda out: (out / "checkpoints").mkdir(mode=0o700) or given_away(out / "checkpoints"),
    "another's metrics": lambda out: (
        (out / "metrics.jsonl").touch() or out.chmod(0o755) or given_away(out / "metrics.jsonl")
    ),
    "another's directory": lambda out: given_away(out),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_run_directory_that_is_not_ones_own_alone_is_not_trained_in(what, tmp_path, tiny):
    out = tmp_path / "run"
    out.mkdir(mode=0o700)
    SPOILT[what](out)
    before = sorted((path.name, path.lstat().st_mtime_ns) for path in out.rglob("*"))
    forks.call(refuse, tiny(), out)
    assert sorted((path.name, path.lstat().st_mtime_ns) for path in out.rglob("*")) == before


def refuse(words, out):
    """Nothing trains in a run directory that is spoilt."""
    for start in (
        lambda settings: process.train(RunStart(settings), World("single", 0, 1), OwnJob()),
        lambda settings: folder.check_run_directory(Path(settings.out)),
    ):
        with pytest.raises(ConfigError, match=f"{out}.* (is a|belongs to another user|can be written by others)"):
            start(config.load(None, words))


def test_what_hpclm_writes_it_accepts_again_whatever_the_umask(tmp_path, tiny):
    out, words = (
        tmp_path / "run",
        tiny("run", "stop_at=2", "checkpoint.every=1", "log.tensorboard=true"),
    )
    forks.hpclm("train", *words, before=leave_all_rights, check=0)
    mine = [path for path in out.rglob("*") if "tensorboard" not in path.parts]  # which is nothing that a run reads
    assert len(mine) > 12 and not [path for path in mine if path.stat().st_mode & folders.OTHERS]
    folder.check_run_directory(out)


def leave_all_rights():
    os.umask(0)


def test_a_folder_of_logs_may_hold_any_names(tmp_path):
    out = make(tmp_path / "run", [attempt()])
    for name in ("rank-1x.log", "rank-.log", f"rank-{'9' * 200}.log", "rank-00002.log"):
        (out / "logs").mkdir(exist_ok=True)
        (out / "logs" / name).touch()
    with pytest.raises(ConfigError, match="ranks with a log: 0 to 2"):
        cli.function("logs")([str(out), "--rank", "7"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_s_run_cannot_have_ones_own_jobs_cancelled():
    with tempfile.TemporaryDirectory() as below:  # pytest's own folders are closed to others
        out = make(Path(below) / "run", [attempt(job_id="7")])
        Path(below).chmod(0o755)
        said = forks.hpclm("cancel", out, before=become_nobody, check=64).stderr
    assert "cannot be cancelled by you; it belongs to root" in said


def become_nobody():
    os.setgroups([])
    os.setresgid(*[NOBODY] * 3)
    os.setresuid(*[NOBODY] * 3)
