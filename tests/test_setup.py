"""``tools/setup.sh`` removes nothing, and runs in a clone that Git has made with the line ends of Windows."""

import os
import shutil
import subprocess
import sys
import venv

import pytest

from tests.runs import ROOT


@pytest.fixture
def clone(tmp_path):
    """A folder with what ``tools/setup.sh`` reads."""
    (tmp_path / "tools").mkdir()
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "tools/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def set_up(clone):
    """Run it without packages: it ends before it has installed PyTorch."""
    env = os.environ | {"PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    return subprocess.run(["bash", "tools/setup.sh"], cwd=clone, env=env, capture_output=True, text=True)


def test_an_environment_without_pip_gets_it_and_keeps_what_it_has(clone):
    venv.create(clone / ".venv")
    mine = clone / ".venv/mine"
    mine.touch()
    said = set_up(clone)
    assert "adding pip to .venv" in said.stdout and "making .venv" not in said.stdout
    assert mine.exists() and subprocess.run([clone / ".venv/bin/python", "-m", "pip", "--version"]).returncode == 0


@pytest.mark.parametrize("python", ["missing/python", None])
def test_an_environment_without_a_python_that_runs_is_named_and_kept(clone, python):
    mine = clone / ".venv/bin/mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    if python:
        (clone / ".venv/bin/python").symlink_to(clone / python)
    said = set_up(clone)
    assert said.returncode == 1 and f"{clone}/.venv has no Python that runs" in said.stderr and mine.exists()


def test_help_on_the_oldest_libraries_installs_nothing():
    env = os.environ | {"PYTHON": "/nowhere/python"}
    done = subprocess.run([ROOT / "tools/test_oldest.sh", "--help"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "tools/test_oldest.sh tests/engine -x" in done.stdout


def test_line_ends_of_a_clone_are_those_of_the_repository(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    command = ["git", "-c", "core.autocrlf=true", "clone", "-q", ROOT, tmp_path / "clone"]
    subprocess.run(command, check=True)
    listed = subprocess.run(
        ["git", "ls-files", "--eol"], cwd=tmp_path / "clone", check=True, capture_output=True, text=True
    )
    kinds = {line.split()[1] for line in listed.stdout.splitlines()}
    assert "w/lf" in kinds and kinds.isdisjoint({"w/crlf", "w/mixed"})
