"""What a job's set-up names and this machine does not have: refused where every node would lack it, else a warning."""

import os

import pytest

from tests.forks import hpclm

SMALL = ["configs/debug.yaml", "engine.device=cpu", "--dry-run", "--cluster", "slurm"]


def dry_run(out, *words):
    env = {**os.environ, "HPCLM_SITE": "", "PATH": "/usr/bin:/bin"}
    return hpclm("submit", *SMALL, f"out={out}/run", *words, env=env)


@pytest.mark.parametrize(
    "word, path",
    [
        ("job.venv={here}/none", "{here}/none/bin/activate"),
        ("job.conda={here}/none", "{here}/none/bin/python"),
        ("job.container={here}/none.sif", "{here}/none.sif"),
        ("job.mounts=[{here}/none:/data]", "{here}/none"),
    ],
    ids=["venv", "conda", "container", "mounts"],
)
def test_a_missing_path_is_refused_on_the_file_system_of_the_run_and_warned_of_elsewhere(word, path, tmp_path):
    setting = word.partition("=")[0]
    more = ["job.container=docker://nvcr.io/x"] if setting == "job.mounts" else []
    done = dry_run(tmp_path, *more, word.format(here=tmp_path))
    assert done.returncode == 64 and f"{setting}: {path.format(here=tmp_path)} does not exist" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = dry_run(tmp_path, *more, word.format(here="/none-on-this-machine"))
    warning = f"warning: {setting}: {path.format(here='/none-on-this-machine')} does not exist here; the job fails if its nodes lack it too"
    assert done.returncode == 0 and done.stderr.count(warning) == 1, done.stderr


def test_what_exists_or_only_a_registry_knows_is_not_warned_of(tmp_path):
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "activate").touch()
    for words in (
        [f"job.venv={tmp_path}/env"],
        ["job.container=docker://nvcr.io/nvidia/pytorch:25.01-py3"],
        ["job.container=docker://nvcr.io/x", "job.mounts=['${HOME}:/x']"],
    ):
        done = dry_run(tmp_path, *words)
        assert (done.returncode, "warning" in done.stderr) == (0, False), done.stderr
