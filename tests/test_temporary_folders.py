"""Folders in the temporary directory that a killed process leaves are removed by the next start, and no others."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from hpclm.base import files, folders
from hpclm.base.errors import HpclmError
from hpclm.node import environment
from tests.runs import ROOT
from tests.test_trust import NOBODY

HOLD = "from hpclm.base import folders\nwith folders.temporary_folder() as folder:\n    print(folder.name, flush=True); input()"


def holder(folder):
    """A process with a temporary folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    name = process.stdout.readline().strip()
    (folder / name / "file").write_text("x")
    return process, name


def ended(process, number):
    process.send_signal(number)
    process.communicate()


@pytest.mark.parametrize("verb", [folders.sweep_temporary, lambda: folders.temporary_folder().__enter__()])
def test_the_next_start_removes_the_folders_of_killed_processes_and_no_others(verb, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (killed, left), (living, used) = holder(tmp_path), holder(tmp_path)
    ended(killed, signal.SIGKILL)
    gone = left.removeprefix(f"hpclm-{files.here()}-").split("-")[0]
    names = {
        "of another machine": f"hpclm-other-{gone}-abcdefgh",
        "without a process": "hpclm-abcdefgh",
        "shared by all": f"hpclm-inductor-{os.geteuid()}",
        "of another program": f"other-{files.here()}-{gone}-abcdefgh",
        "a file": f"hpclm-{files.here()}-{gone}-abcdefgi",
        "a link": f"hpclm-{files.here()}-{gone}-abcdefgj",
    }
    for what, name in names.items():
        (tmp_path / name).touch() if what == "a file" else (tmp_path / name).symlink_to(
            tmp_path / "target"
        ) if what == ("a link") else (tmp_path / name).mkdir()
    (tmp_path / "target").mkdir()
    if os.geteuid() == 0:
        names["of another user"] = f"hpclm-{files.here()}-{gone}-abcdefgk"
        (tmp_path / names["of another user"]).mkdir()
        os.chown(tmp_path / names["of another user"], NOBODY, NOBODY)
    fallback = tmp_path / f"hpclm-inductor-{files.here()}-{gone}-abcdefgh"
    fallback.mkdir()
    verb()
    assert not (tmp_path / left).exists() and not fallback.exists()
    assert (tmp_path / used / "file").exists() and (tmp_path / "target").exists()
    assert [name for name in names.values() if not os.path.lexists(tmp_path / name)] == []
    ended(living, signal.SIGKILL)
    shutil.rmtree(tmp_path / used)


def for_deepspeed():
    environment.for_deepspeed("cpu", 0, builds=True, env={"SLURM_JOB_ID": "12"})


@pytest.mark.parametrize("make", [lambda: folders.temporary_folder().__enter__(), for_deepspeed])
def test_where_no_temporary_folder_can_be_made_the_error_says_so_in_a_line(make, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(HpclmError, match=rf"^{tmp_path}/gone[^\n]*: No such file .*set TMPDIR to another folder$"):
        make()


def test_where_no_place_is_writable_the_error_names_them(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/self"])  # as if /tmp were read-only, too
    with pytest.raises(HpclmError, match=r"^no temporary folder: .*\['/proc/self'\]; .*set TMPDIR"):
        folders.temporary_folder().__enter__()
