"""Container recipes and example site files: what can be checked of them without an engine and without their clusters."""

import configparser
import re

import pytest
from packaging.requirements import Requirement

from hpclm import cli, config
from tests.runs import ROOT

FOLDER = ROOT / "tools" / "containers"
SITES = sorted((ROOT / "slurm" / "sites").glob("*.yaml"))


def copied():
    """What the Dockerfile copies from the clone, in order."""
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    return [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]


def test_both_recipes_copy_files_that_are_there_and_do_the_same():
    docker, apptainer = (FOLDER / "Dockerfile").read_text(), (FOLDER / "hpclm.def").read_text()
    listed = [line.split()[0] for line in re.search(r"%files\n(.*?)\n\n", apptainer, re.S)[1].splitlines()]
    assert {name for name in [*copied(), *listed] if not (ROOT / name).exists()} == set()
    assert set(copied()) - {"hpclm/__init__.py"} == set(listed)  # which is copied with hpclm, too
    for both in ("python:3.11-slim-bookworm", "build-essential openmpi-bin git", "[all]", "whl/cpu", "DEVICE=cuda"):
        assert both in docker and both in apptainer, both


def test_the_build_context_is_what_the_dockerfile_copies():
    first, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*" and rest.pop() == "**/__pycache__"
    assert {f"!{name}" for name in copied()} - {"!hpclm/__init__.py"} == set(rest)


def test_a_change_of_the_code_leaves_the_installed_libraries_in_their_layer():
    docker = (FOLDER / "Dockerfile").read_text()
    before, after = docker.split("COPY hpclm /opt/hpclm/hpclm\n")
    assert "[all]" in before and "apt-get" not in after
    assert re.findall(r"pip install (.*?)/opt/hpclm", after) == ["--no-deps --no-build-isolation "]


def test_the_lock_has_a_version_of_every_library_that_setup_cfg_asks_for():
    lines = [line for line in (FOLDER / "lock.txt").read_text().splitlines() if not line.startswith("#")]
    lock = dict(line.split("==") for line in lines)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {name: text for name, text in setup["options.extras_require"].items() if name not in ("dev", "all")}
    for text in [setup["options"]["install_requires"], *extras.values()]:
        for line in filter(None, text.splitlines()):
            wanted = None if line.startswith(("#", "hpclm[")) else Requirement(line)
            assert wanted is None or wanted.specifier.contains(lock[wanted.name.lower()]), line


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
def test_an_example_site_file_gives_a_job_script(path, tiny, monkeypatch, capsys):
    found = config.from_cli(["debug"], path)
    assert found.job.partition and found.cluster.interface
    monkeypatch.setenv("HPCLM_SITE", str(path))
    assert cli.main(["submit", "--dry-run", *tiny("run", "job.nodes=2", "batch.micro_size=1", "job.gpus=4")]) == 0
    script = capsys.readouterr().out
    assert f"--partition={found.job.partition}" in script and "--nodes=2" in script
