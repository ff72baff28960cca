"""Why a job was started again, according to the run's events and to Slurm."""

from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import single
from hpclm.launch.schedulers import current_job
from hpclm.rundir.summary import KILLED
from hpclm.training import records
from tests.events import note

SCONTROL = """#!/bin/sh
echo $* >> FOLDER/asked
echo 'NodeName=node1 Arch=x86_64 State=MIXED+DRAIN Reason=a broken GPU [root@2026]'
echo 'NodeName=node2 Arch=x86_64 State=IDLE'
"""


def test_a_task_of_an_array_whose_script_was_killed_asks_about_itself_and_requeues_itself_alone(tmp_path, monkeypatch):
    answer = "JobState=RUNNING Requeue=1 Restarts=0 Reason=JobLaunchFailure"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $* >> {tmp_path}/asked; echo {answer}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for array, name in ({}, "9"), ({"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}, "9_3"):
        job = current_job(env={"SLURM_JOB_ID": "9"} | array)
        assert job.requeue_if_abandoned() and job.requeue(["node1"])
        asked = [
            "show job {} --oneliner",
            "show job {} --oneliner",
            "requeue {}",
            "show job {} --oneliner",
            "requeue {}",
        ]
        expected = [*asked, "update jobid={} excnodelist=node1"]
        assert (tmp_path / "asked").read_text().splitlines() == [line.format(name) for line in expected]
        (tmp_path / "asked").unlink()


def test_a_job_that_slurm_started_again_says_how_the_last_start_ended_and_what_its_nodes_suffer_from(
    tmp_path, monkeypatch
):
    note(tmp_path, "began", hosts=["node1.cluster", "node2"])
    (tmp_path / "scontrol").write_text(SCONTROL.replace("FOLDER", str(tmp_path)))
    (tmp_path / "scontrol").chmod(0o755)
    context = single(world=World("Slurm", 0, 1))
    assert records.log_restart(tmp_path, context) == KILLED
    note(tmp_path, "ended", code=137, cause="rank 1 on node1 was killed")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    context.job = current_job(env={"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
    told = records.log_restart(tmp_path, context)
    drained = "node1 is MIXED+DRAIN (a broken GPU [root@2026])"
    assert told == f"start 2 of job 7; why the last one ended: rank 1 on node1 was killed; {drained}"
    assert (tmp_path / "asked").read_text() == "show node --oneliner node1,node2\n"  # once for all nodes
    monkeypatch.setenv("PATH", "/nowhere")
    assert not context.job.requeue_if_abandoned()
