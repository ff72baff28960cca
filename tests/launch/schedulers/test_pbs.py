"""PBS, by a class of a user's own: a job that is preempted is requeued by its script, and its next start resumes the run."""

import json
import os
import signal
import sys

import pytest

from hpclm.launch.jobs import state
from hpclm.launch.schedulers import current_job
from tests.events import began, of_kind
from tests.forks import hpclm
from tests.launch.schedulers import pbs_commands
from tests.runs import PATIENCE, ROOT, has_step, until

PBS = "tests.launch.schedulers.pbs:Pbs"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The folder of a queue whose commands are on the PATH."""
    commands, server = tmp_path / "bin", tmp_path / "server"
    for folder in (commands, server):
        folder.mkdir()
    for name in ("qsub", "qstat", "qdel", "qrerun"):
        path = commands / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {pbs_commands.__file__} {server} {name} "$@"\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HPCLM_SITE", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield server
    for path in server.glob("*.json"):  # of a test that has failed
        if row_of(server, path.stem)["job_state"] != "F":
            pbs_commands.qdel(server, "-W", "force", path.stem)


def attempts(out):
    return began(out)


def row_of(server, job):
    return json.loads((server / f"{job}.json").read_text())


def test_a_job_of_pbs_that_is_preempted_is_requeued_and_resumes_and_its_lease_names_it(tmp_path, tiny, server):
    out = tmp_path / "run"
    done = hpclm("submit", *tiny("run", "budget.steps=1000000"), f"job.cluster={PBS}", check=0)
    job = done.stdout.split()[1].rstrip(":")
    assert job == "1.pbs"
    until(lambda: has_step(out, 3), "step 3")
    assert json.loads((out / "lock").read_text())["job"] == job
    os.killpg(row_of(server, job)["group"], signal.SIGTERM)  # as PBS preempts
    until(lambda: len(attempts(out)) == 2, "the second start")
    first, second = attempts(out)
    end, of_the_job = of_kind(out, "ended")
    assert (of_the_job["job_id"], of_the_job["code"], of_the_job["restart"]) == (job, 85, 0)
    assert [(row["job_id"], row["restart"]) for row in (first, second)] == [(job, 0), (job, 1)]
    assert end["code"] == 85 and second["from_step"] == end["step"] > 0
    assert f"start 2 of job {job}; why the last one ended: SIGTERM: saved at step {end['step']}" in second["after"]
    lease = json.loads((out / "lock").read_text())
    assert (lease["job"], lease["start"], lease["generation"]) == (job, 1, 2)
    until(lambda: state(out, PATIENCE).name == "running", "a step after the resume")
    status = state(out, PATIENCE)
    assert (status.job.id, row_of(server, job)["run_count"]) == (job, 2)
    said = hpclm("cancel", out, check=0).stdout
    assert f"job {job}: asked to save and exit" in said and "saved at step" in said
    assert row_of(server, job)["job_state"] == "F" and len(attempts(out)) == 2


def test_a_process_of_pbs_knows_its_job_and_one_of_slurm_is_still_slurms(tmp_path):
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    env = {"PBS_JOBID": "12[3].pbs", "PBS_ARRAY_INDEX": "3", "PBS_NODEFILE": f"{tmp_path}/nodes", "PBS_RUN_COUNT": "2"}
    job = current_job(PBS, env)
    assert (job.scheduler, job.row()) == ("PBS", {"job_id": "12[3].pbs", "restart": 1})
    assert (job.array_task, job.hosts) == ("3", ("n1", "n2"))
    assert not job.requeue(["n2"])  # it cannot leave a node out, so it is not asked
    assert current_job(PBS, {"SLURM_JOB_ID": "7"}).scheduler == "Slurm"
    assert current_job("slurm", env).id == "" and current_job(PBS, {}).row() == {}


def test_a_scheduler_that_fails_does_not_end_the_process_that_asks_it(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    job = current_job(PBS, {"PBS_JOBID": "1.pbs", "PBS_NODEFILE": os.devnull})
    assert not job.requeue() and "PBS: " in caplog.text
