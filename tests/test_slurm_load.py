"""What the commands and a run cost slurmctld, which a whole cluster shares: requests, as its own sdiag counts them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.runs import PATIENCE, ROOT
from tests.slurm import until
from tests.test_preemption import Job

# Requests of one squeue, scontrol or sinfo: some ask for partitions or the federation too.
BUDGET = {
    "submit": 5,  # 3, and what the script asks about its job, which may have started by then
    "submit with GPUs": 9,  # the partition for its time limit, and the nodes for the cores and memory that they keep
    "status": 3,
    "logs": 3,
    "logs -f, a minute": 3,
    "top, a minute": 3,
    "run": 0,
}


def requests(cluster):
    """The requests since the last call that are no part of sdiag itself, or of Slurm's own daemons and srun."""
    text = cluster.run(["sdiag"]).stdout.partition("by message type")[2].partition("by user")[0]
    cluster.run(["sdiag", "--reset"])
    found = {name: int(count) for name, count in re.findall(r"(REQUEST_\w+) .*?count:(\d+)", text)}
    own = (
        "STATS_INFO",
        "STEP_CREATE",
        "STEP_COMPLETE",
        "COMPLETE_BATCH",
        "HET_JOB_ALLOC",
        "NODE_REGISTRATION",
        "JOB_NOTIFY",
    )
    return {name: count for name, count in found.items() if not any(part in name for part in own)}


@pytest.mark.slurm
def test_slurmctld_is_asked_little(cluster, tmp_path):
    env = {**cluster.env, "HPCLM_SITE": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    hpclm = [sys.executable, "-m", "hpclm"]
    spent = {}
    requests(cluster)
    job = Job(cluster, tmp_path / "run", 2, 1, "budget.steps=1000000", "optim.schedule=constant")
    spent["submit"] = requests(cluster)
    job.hpclm("submit", "--gpus", "8", "--sbatch", "hold", f"out={tmp_path}/held")
    spent["submit with GPUs"] = requests(cluster)
    job.wait_for_step(2)
    requests(cluster)
    before = job.step()
    time.sleep(3)
    until(lambda: job.step() > before, "another step", cluster)
    spent["run"] = requests(cluster)
    with subprocess.Popen([*hpclm, "logs", "-f", job.out], env=env, stdout=subprocess.DEVNULL) as follower:
        time.sleep(10)  # it used to ask every 2 s
        assert follower.poll() is None
        (job.out / "stop").touch()
        assert follower.wait(PATIENCE) == 0  # by the run's own files: Slurm is not asked again
    spent["logs -f, a minute"] = requests(cluster)
    job.hpclm("status", job.out, tmp_path / "held")
    spent["status"] = requests(cluster)
    job.hpclm("logs", job.out)
    spent["logs"] = requests(cluster)
    code = f"from pathlib import Path; from hpclm.launch.jobs import States; from hpclm.reporting.run_table import TopScreen; watch = TopScreen(Path({str(tmp_path)!r}), States(1.0).of)"
    cluster.run([sys.executable, "-c", f"{code}; [watch.look() for _ in range(20)]"], env=env)
    spent["top, a minute"] = requests(cluster)
    assert spent.keys() == BUDGET.keys()
    over = {name: asked for name, asked in spent.items() if sum(asked.values()) > BUDGET[name]}
    assert not over


@pytest.mark.slurm
@pytest.mark.whole
def test_why_a_job_failed_before_training_or_crashed_is_told_by_status(cluster, tmp_path):
    started = {
        "module": Job(cluster, tmp_path / "module", 1, 1, "job.modules=[nosuchmodule]"),
        "crash": Job(
            cluster, tmp_path / "crash", 1, 1, "job.requeue=false", "job.setup=['ulimit -c 0']", "budget.steps=100000"
        ),
    }
    crash = started["crash"]
    crash.wait_for_step(1)
    os.kill(crash.ranks()[0].pid, signal.SIGSEGV)
    said = {}
    for name, job in started.items():
        until(lambda job=job: cluster.show(job.id)["JobState"] in ("FAILED", "COMPLETED"), "end", cluster)
        said[name] = job.hpclm("status", job.out).stdout
    assert "module: command not found; job" in said["module"] and "NonZeroExitCode" not in said["module"]
    assert "Segmentation fault" in said["crash"], said["crash"]
