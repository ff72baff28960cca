"""How often a job's script asks for another start, with programs in the place of Slurm's and mpirun."""

import os
import subprocess

import pytest

from tests.runs import ROOT

SCRIPTS = ["srun", "torchrun", "mpirun", "container"]
SCONTROL = """#!/bin/bash
case $1 in show) echo "JobId=7 JobState=RUNNING Requeue=1" ;; requeue) echo $2 >> requeued ;; esac
"""


def start(template, folder, number, ending, trained):
    """Exit code of start ``number`` of the job, and how often it has been requeued until then."""
    for name in ("srun", "mpirun"):
        line = "echo '10:00:00 I run directory /out, a new run' >&2; " if trained else ""
        (folder / name).write_text(f"#!/bin/bash\n{line}exit {ending}\n")
    (folder / "scontrol").write_text(SCONTROL)
    for name in ("srun", "mpirun", "scontrol"):
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1", "SLURMD_NODENAME": "node1"}
    env = (
        os.environ | job | {"SLURM_RESTART_COUNT": str(number), "PATH": f"{folder}:{os.environ['PATH']}", "image": "x"}
    )
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


@pytest.mark.parametrize("template", SCRIPTS)
def test_a_job_that_trains_in_every_start_is_started_again_each_time(template, tmp_path):
    assert [start(template, tmp_path, number, 85, trained=True) for number in range(6)] == [
        (85, n) for n in range(1, 7)
    ]
