"""Why a job was started again, as Slurm's own records have it."""

import time

import pytest

from hpclm.distributed import restart
from tests.slurm import slurm_cluster, until


@pytest.mark.slurm
@pytest.mark.whole
def test_sacct_and_the_job_s_own_log_say_why_the_last_start_ended(tmp_path):
    with slurm_cluster("--accounting", "--nodes", 1) as cluster:
        log = tmp_path / "job.log"
        script = 'echo "start $((SLURM_RESTART_COUNT + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"; sleep 987'
        job = cluster.batch(script, "--requeue", f"--output={log}", "--open-mode=append")
        cluster.wait(job, "RUNNING")
        time.sleep(1)
        cluster.run(["scontrol", "requeue", job])
        until(lambda: cluster.show(job)["Restarts"] == "1" and cluster.state(job) == "RUNNING", 60, "restart", cluster)
        env = {**cluster.env, "SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": "1"}
        accounted, logged = until(lambda: len(found := restart.reasons(env=env)) == 2 and found, 60, "reasons", cluster)
        assert accounted.startswith("sacct says REQUEUED, exit code 0:0, on node1, ended 20")
        assert logged.startswith(f"JOB {job} ON node1 CANCELLED AT 20") and logged.endswith("DUE TO JOB REQUEUE")
        assert restart.trouble("node1.cluster.example", env=env) == ""
        cluster.run(["scontrol", "update", "nodename=node1", "state=drain", "reason=a broken GPU"])
        assert restart.trouble("node1.cluster.example", env=env).startswith(
            "node1 is MIXED+DRAIN (a broken GPU [root@20"
        )
        assert restart.trouble("unknown", env=env) == ""


def test_without_slurm_there_is_nothing_to_tell():
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PATH": "/nowhere"}
    assert restart.reasons(["node1"], env) == [] and not restart.abandoned(env)


@pytest.mark.parametrize(
    "log, told",
    [
        (
            ["srun: error: node1: task 0: Segmentation fault", "srun ended with exit code 139", "{requeued}"],
            ["srun ended with exit code 139: a process was killed by SIGSEGV: a crash inside a library"],
        ),
        (["srun ended with exit code 85", "{requeued}"], ["srun ended with exit code 85"]),
        (
            ["{requeued}", "srun ended with exit code 143"],
            ["{requeue}", "srun ended with exit code 143: a process was killed by SIGTERM"],
        ),
    ],
    ids=["crash", "saved", "by a person"],
)
def test_that_the_script_put_its_job_back_into_the_queue_is_no_reason(log, told, tmp_path):
    requeue = "JOB 7 ON node1 CANCELLED AT 2026-01-01T10:00:00 DUE TO JOB REQUEUE"
    fill = {"requeue": requeue, "requeued": f"slurmstepd: error: *** {requeue} ***"}
    lines = ["start 1 of job 7 on node[1-2]", *(line.format(**fill) for line in log), "start 2 of job 7 on node[1-2]"]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "scontrol").write_text(
        f"#!/bin/sh\n[ $2 = job ] && echo '   StdOut={tmp_path}/job.log' || echo $* >> {tmp_path}/asked\n"
    )
    (tmp_path / "sacct").write_text("#!/bin/sh\necho 'REQUEUED|0:0|node[1-2]|2026-01-01T10:00:00'\n")
    for name in ("scontrol", "sacct"):
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = restart.reasons(["node1.cluster", "node2"], env)
    assert [text for text in found if not text.startswith("sacct")] == [line.format(**fill) for line in told]
    assert any(text.startswith("sacct says REQUEUED") for text in found) == (log[0] == "{requeued}")
    assert (tmp_path / "asked").read_text() == "show node --oneliner node1,node2\n"  # once for all nodes
