"""Whatever lies beside the state of training may fail at any time: training goes on, with the same losses, and one warning for each.

The faults are real: a full or read-only file system, files and folders that are removed, replaced or links.
"""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from hpclm import cli
from hpclm.base import side_path
from hpclm.data.synthetic import synthetic
from tests import faults
from tests.forks import Ranks
from tests.runs import losses

STEPS, BREAKS, MENDS = 60, 20, 40
FILES = ("log.txt", "metrics.jsonl", "summary.json")
FOLDERS = ("tensorboard", "config-history", "logs", "profile")
PATHS = FILES + FOLDERS
SAMPLES = 8  # of a step


def removed(path):
    """What it was: a file, a folder, or nothing yet."""
    kind = "file" if path.name in FILES else "folder"
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(f".{path.name}-removed")
        path.rename(aside)  # at once: a sink may write in it
        shutil.rmtree(aside, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return kind


def gone(path):
    removed(path)


def replaced(path, make):
    """``make(path, kind)`` puts something in its place at once: the run makes a file again while it is gone."""
    there = path.parent.parent / f"put-{path.name}"
    make(there, "file" if path.name in FILES else "folder")
    while True:
        removed(path)
        with contextlib.suppress(OSError):
            there.rename(path)
            return


def other_kind(path):
    replaced(path, lambda there, kind: there.touch() if kind == "folder" else there.mkdir())


def dangling(path):
    replaced(path, lambda there, _: there.symlink_to("nowhere/at/all"))


def elsewhere(path):
    target = path.parent.parent / "elsewhere" / path.name
    target.parent.mkdir(exist_ok=True)
    target.touch() if path.name in FILES else target.mkdir(exist_ok=True)
    replaced(path, lambda there, _: there.symlink_to(target))


def a_pipe(path):
    replaced(path, lambda there, _: os.mkfifo(there))


def read_only(path):
    """Another file system, which nobody may write, in its place."""
    path.touch() if path.name in FILES else path.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", path, path], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)


def writable_again(path):
    subprocess.run(["umount", path], check=True)


def back(path):
    """What a person does who notices: what is in the way is moved away."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir() or path.name in FILES:
            removed(path)


def full(path):
    """The file system of ``path``, a file that takes all its room."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def failing(path):
    """A device that fails every write with EIO in place of each file: the memory of this process, where nothing is mapped."""
    for file in [path] if path.name in FILES else [each for each in path.glob("*") if each.is_file()]:
        file.touch()
        subprocess.run(["mount", "--bind", f"/proc/{os.getpid()}/mem", file], check=True)


def mended(path):
    for file in [path] if path.name in FILES else [each for each in path.glob("*") if each.is_file()]:
        subprocess.run(["umount", "-lq", file], check=False)  # the run has it open


LOST = contextlib.ExitStack()
"""Undoes what ``stale`` does."""


def stale(path):
    """As on NFS once the server does not know the file any more. No local file system does that, so the calls are replaced."""

    def refused(call):
        def instead(target, *more, **named):
            name = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else os.fspath(target)
            if str(name).startswith(str(path)):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), *[] if isinstance(target, int) else [name])
            return call(target, *more, **named)

        return instead

    for name in ("open", "write", "mkdir", "fsync", "replace", "rename", "listdir", "scandir"):
        LOST.enter_context(mock.patch.object(os, name, refused(getattr(os, name))))


def known_again(path):
    LOST.close()


FAULTS = {
    "full": (full, gone),
    "removed": (gone, None),
    "a folder for a file, or a file for a folder": (other_kind, back),
    "a dangling link": (dangling, back),
    "a link to elsewhere": (elsewhere, back),
    "a pipe": (a_pipe, back),
    "read-only": (read_only, writable_again),
    "an input/output error": (failing, mended),
    "a stale file handle": (stale, known_again),
}
MOUNTED = ("read-only", "an input/output error")


def source(*words):
    """Synthetic data; TEST_FAULT befalls TEST_PATHS of TEST_RUN in step BREAKS, and with TEST_MENDS is undone in step MENDS."""
    breaks, mends = FAULTS[os.environ["TEST_FAULT"]]
    paths = [Path(os.environ["TEST_RUN"], name) for name in os.environ["TEST_PATHS"].split()]

    def act(number):
        if number == BREAKS * SAMPLES // int(os.environ.get("WORLD_SIZE", "1")):
            for path in paths:
                breaks(path)
        elif (
            number == MENDS * SAMPLES // int(os.environ.get("WORLD_SIZE", "1")) and mends and "TEST_MENDS" in os.environ
        ):
            for path in reversed(paths):
                mends(path)

    return faults.watched(synthetic(*words), act)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The losses of a run that nothing befalls."""
    out = tmp_path_factory.mktemp("right") / "run"
    assert cli.main(["train", *words(out), "data.source=synthetic"]) == 0
    return losses(out)


def words(out, *more):
    shape = "model={vocab_size: 64, layers: 1, hidden: 16, context: 8, attention: {heads: 2}}"
    batch = ["batch={global_size: 8, micro_size: 8}", f"budget.steps={STEPS}", "optim.lr=3e-3", "optim.min_lr=1e-4"]
    rest = ["engine.device=cpu", "engine.precision=fp32", "checkpoint.every=15", "log.every=1", "data.workers=0"]
    return [shape, *batch, *rest, "evaluate.every=20", f"out={out}", *more]


def mounts():
    """Whether file systems may be mounted here."""
    return os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode


def cases():
    """All paths at once for every fault; each of them alone, which takes longer, with --whole."""
    for fault in list(FAULTS)[1:]:
        marks = [pytest.mark.skipif(not mounts(), reason="needs the right to mount")] if fault in MOUNTED else []
        for mends in (True, False):
            yield pytest.param(fault, PATHS, mends, marks=marks, id=f"all-{fault}-{'mended' if mends else 'for good'}")
        for path in PATHS:
            yield pytest.param(fault, (path,), True, marks=[*marks, pytest.mark.whole], id=f"{path}-{fault}")


@pytest.mark.parametrize("fault, paths, mends", list(cases()))
def test_a_run_goes_on_whatever_happens_to_what_lies_beside_it(
    right, tmp_path, monkeypatch, capfd, fault, paths, mends
):
    out = tmp_path / "run"
    more = ["profile.steps=[30,31]"] if "profile" in paths and (len(paths) == 1 or fault.startswith("a folder")) else []
    code, shown = befallen(out, fault, paths, mends, more, monkeypatch, capfd)
    assert code == 0, shown
    for path in paths:
        assert len(warnings_of(path, shown)) <= 1 + mends, shown  # what mends it is a change of its own
    assert " E " not in shown
    if "metrics.jsonl" not in paths:
        assert losses(out) == right
    if mends or fault == "removed":
        kept = {step: loss for step, loss in losses(out).items() if step > MENDS + 2}
        assert kept.items() <= right.items() and STEPS in kept
        assert events_after(out / "tensorboard", MENDS)
    assert (out / f"checkpoints/step-{STEPS:08}/MANIFEST.json").exists()
    assert cli.main(["checkpoints", str(out)]) == 0  # the last one is whole


@pytest.mark.skipif(not mounts(), reason="needs the right to mount")
@pytest.mark.parametrize("mends", [True, False], ids=["for a while", "for good"])
def test_a_run_goes_on_while_the_disk_of_all_but_its_checkpoints_is_full(right, tmp_path, monkeypatch, capfd, mends):
    out = tmp_path / "run"
    for folder in (out, tmp_path / "disk"):
        folder.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", out], check=True)
    try:
        (out / "checkpoints").symlink_to(tmp_path / "disk")
        code, shown = befallen(out, "full", ["filler"], mends, [], monkeypatch, capfd)
        assert code == 0 and " E " not in shown, shown
        for path in (*FILES, "tensorboard"):
            assert len(warnings_of(path, shown)) <= 1, shown
        assert warnings_of("metrics.jsonl", shown) and warnings_of("tensorboard", shown)
        if mends:
            assert losses(out) == right and events_after(out / "tensorboard", MENDS)
            assert " step 60/60 " in (out / "log.txt").read_text()
        assert (tmp_path / f"disk/step-{STEPS:08}/MANIFEST.json").exists()
    finally:
        subprocess.run(["umount", "-l", out], check=True)


def cases_of_two():
    for fault in list(FAULTS)[1:]:
        marks = [pytest.mark.skipif(not mounts(), reason="needs the right to mount")] if fault in MOUNTED else []
        marks += [pytest.mark.whole] if fault != "removed" else []
        yield pytest.param(fault, marks=marks, id=fault)


@pytest.mark.parametrize("fault", list(cases_of_two()))
def test_two_ranks_go_on_whatever_happens_to_the_second_one_s_log_and_to_sinks(right, tmp_path, fault):
    out = tmp_path / "run"
    settings = words(out, f"data.source={__name__}:source", "log.sinks=[tests.sinks.own:Written]", "batch.micro_size=4")
    with Ranks(2, settings, TEST_FAULT=fault, TEST_RUN=str(out), TEST_PATHS="logs sinks") as ranks:
        try:
            ended = ranks.wait()
        finally:
            for name in ("logs", "sinks") if fault in MOUNTED else ():
                mended(out / name)
                subprocess.run(["umount", "-lq", out / name], check=False)
    assert {code for code, _ in ended.values()} == {0}, ended
    assert {step: float.fromhex(loss) for step, loss in losses(out).items()} == pytest.approx(
        {step: float.fromhex(loss) for step, loss in right.items()}, abs=1e-5
    )
    assert (out / f"checkpoints/step-{STEPS:08}/MANIFEST.json").exists()


@pytest.mark.skipif(not mounts(), reason="needs the right to mount")
def test_two_ranks_go_on_while_there_is_no_room_for_the_log_of_the_second_one(right, tmp_path):
    out = tmp_path / "run"
    (out / "logs").mkdir(parents=True, mode=0o700)
    out.chmod(0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", out / "logs"], check=True)
    try:
        settings = words(out, f"data.source={__name__}:source", "batch.micro_size=4")
        with Ranks(2, settings, TEST_FAULT="full", TEST_RUN=str(out), TEST_PATHS="logs/filler") as ranks:
            ended = ranks.wait()
    finally:
        subprocess.run(["umount", "-l", out / "logs"], check=True)
    assert {code for code, _ in ended.values()} == {0}, ended
    assert {step: float.fromhex(loss) for step, loss in losses(out).items()} == pytest.approx(
        {step: float.fromhex(loss) for step, loss in right.items()}, abs=1e-5
    )


@pytest.mark.parametrize("module", ["tensorboard", "tensorboard.compat.proto.event_pb2", "google.protobuf"])
def test_a_run_goes_on_where_tensorboard_cannot_be_imported(right, tmp_path, monkeypatch, capfd, module):
    for name in list(sys.modules):
        if name.startswith(("tensorboard", "google.protobuf")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    out = tmp_path / "run"
    code = cli.main(["train", *words(out, "data.source=synthetic")])
    shown = capfd.readouterr().err
    assert code == 0 and losses(out) == right, shown
    assert len(warnings_of("tensorboard", shown)) == 1 and " E " not in shown


def befallen(out, fault, paths, mends, more, monkeypatch, capfd):
    """The exit code of a run to whose ``paths`` the ``fault`` happens, and what it says."""
    folder = out.parent
    monkeypatch.setattr(side_path, "FIRST_PAUSE_SECONDS", 0.0)  # the run is shorter than the pause before the next try
    for name, value in (("FAULT", fault), ("RUN", out), ("PATHS", " ".join(paths)), *[("MENDS", "1")] * mends):
        monkeypatch.setenv(f"TEST_{name}", str(value))
    (folder / "code").mkdir()  # in a folder of its own: a run lists all code beside that which it uses
    (folder / "code/befallen.py").write_text(f"from {__name__} import source\n")
    monkeypatch.syspath_prepend(folder / "code")
    monkeypatch.delitem(sys.modules, "befallen", raising=False)
    try:
        code = cli.main(["train", *words(out, "data.source=befallen:source", *more)])
    finally:
        LOST.close()
        for path in paths if fault in MOUNTED else ():
            mended(out / path)
            subprocess.run(["umount", "-lq", out / path], check=False)
    return code, capfd.readouterr().err


def warnings_of(path, shown):
    return re.findall(rf" W .*{re.escape(path)}\S* cannot be written", shown)


def events_after(folder, step):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = EventAccumulator(str(folder)).Reload().Scalars("lm-loss-training/lm loss")
    return [event for event in scalars if event.step > step]
