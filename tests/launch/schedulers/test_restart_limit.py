"""How often a job's script asks for another start, with programs in the place of Slurm's and mpirun."""

import os
import shutil
import subprocess

import pytest

from tests.runs import ROOT

SCRIPTS = ["srun", "torchrun", "mpirun", "container"]
SCONTROL = """#!/bin/bash
case $1 in show) echo "JobId=7 JobState=RUNNING Requeue=1" ;; requeue) echo $2 >> requeued ;; esac
"""


def start(template, folder, number, ending, trained=False, said=(), path=os.environ["PATH"]):
    """Exit code of start ``number`` of the job, and how often it has been requeued until then; ``said``: by srun, of its tasks."""
    lines = ["10:00:00 I run directory /out, a new run"] * trained + [f"srun: error: n1: {line}" for line in said]
    for name in ("srun", "mpirun"):
        (folder / name).write_text("\n".join(["#!/bin/bash", "cat >&2 <<END", *lines, "END", f"exit {ending}"]))
    if path == os.environ["PATH"]:
        (folder / "scontrol").write_text(SCONTROL)
    for program in folder.iterdir():
        program.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1", "SLURMD_NODENAME": "node1"}
    env = os.environ | job | {"SLURM_RESTART_COUNT": str(number), "PATH": f"{folder}:{path}", "image": "x"}
    with (folder / "job.log").open("a") as log:
        words = ["bash", str(ROOT / f"slurm/{template}.sbatch"), "config.yaml"]
        done = subprocess.run(words, cwd=folder, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    requeued = folder / "requeued"
    return done.returncode, len(requeued.read_text().split()) if requeued.exists() else 0


@pytest.mark.parametrize("template", SCRIPTS)
@pytest.mark.parametrize("ending", [85, 137])
def test_a_job_of_which_three_starts_in_a_row_end_before_training_is_not_started_again(ending, template, tmp_path):
    assert start(template, tmp_path, 0, ending, trained=False) == (ending, 1)
    assert start(template, tmp_path, 1, ending, trained=True) == (ending, 2)
    assert start(template, tmp_path, 2, ending, trained=False) == (ending, 3)
    assert start(template, tmp_path, 3, ending, trained=False) == (ending, 4)
    assert start(template, tmp_path, 4, ending, trained=False) == (93, 4)
    assert (
        "3 starts in a row ended before training began: the job is not started again"
        in (tmp_path / "job.log").read_text()
    )


FIRST = {
    "a mistake": (85, ["tasks 2-3: Exited with exit code 64", "tasks 0-1: Exited with exit code 85"], 64, 0),
    "a failure while others start": (143, ["task 3: Exited with exit code 1", "tasks 0-2: Terminated"], 1, 0),
    "a kill": (137, ["task 1: Killed", "task 0: Exited with exit code 1"], 137, 1),
    "a save": (85, ["task 1: Exited with exit code 85", "task 0: Exited with exit code 1"], 85, 1),
}


@pytest.mark.parametrize("template", ["srun", "torchrun", "container"])
@pytest.mark.parametrize("highest, said, code, requeued", FIRST.values(), ids=FIRST)
def test_the_first_process_that_fails_decides_not_those_that_srun_then_ends(
    template, highest, said, code, requeued, tmp_path
):
    (tmp_path / "job.log").write_text("start 1 of job 7 on n1\nsrun: error: n1: task 0: Exited with exit code 66\n")
    assert start(template, tmp_path, 1, highest, said=said) == (code, requeued)


@pytest.mark.parametrize("template", SCRIPTS)
def test_where_scontrol_is_missing_a_script_ends_at_once(template, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("awk", "bash", "cat", "hostname", "id", "od", "python", "tr"):
        (programs / name).symlink_to(shutil.which(name))
    assert start(template, tmp_path, 0, 85, path=programs) == (85, 0)
    assert "scontrol is not installed here: the job is not started again" in (tmp_path / "job.log").read_text()


@pytest.mark.parametrize("template", SCRIPTS)
def test_a_job_that_trains_in_every_start_is_started_again_each_time(template, tmp_path):
    assert [start(template, tmp_path, number, 85, trained=True) for number in range(6)] == [
        (85, n) for n in range(1, 7)
    ]
