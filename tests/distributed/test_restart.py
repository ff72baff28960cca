"""Why a job was started again, according to Slurm and the job's log."""

import pytest

from hpclm.distributed import restart


def test_without_slurm_there_are_no_reasons():
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PATH": "/nowhere"}
    assert restart.reasons(env=env) == [] and not restart.abandoned(env)


REQUEUE = "JOB 7 ON node1 CANCELLED AT 2026-01-01T10:00:00 DUE TO JOB REQUEUE"
REQUEUED = f"slurmstepd: error: *** {REQUEUE} ***"
SCONTROL = """#!/bin/sh
[ $2 = job ] && echo '   StdOut=FOLDER/job.log' && exit
echo $* >> FOLDER/asked
echo 'NodeName=node1 Arch=x86_64 State=MIXED+DRAIN Reason=a broken GPU [root@2026]'
echo 'NodeName=node2 Arch=x86_64 State=IDLE'
"""


@pytest.mark.parametrize(
    "log, reasons",
    {
        "a crash": (
            ["srun: error: node1: task 0: Segmentation fault", "srun ended with exit code 139", REQUEUED],
            ["srun ended with exit code 139: a process was killed by SIGSEGV: a crash inside a library"],
        ),
        "its script requeued it": (["srun ended with exit code 85", REQUEUED], ["srun ended with exit code 85"]),
        "a person requeued it": (
            [REQUEUED, "srun ended with exit code 143"],
            [REQUEUE, "srun ended with exit code 143: a process was killed by SIGTERM"],
        ),
    }.values(),
)
def test_the_job_s_log_and_its_nodes_say_why_the_last_start_ended(log, reasons, tmp_path, monkeypatch):
    lines = ["start 1 of job 7 on node[1-2]", *log, "start 2 of job 7 on node[1-2]"]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "scontrol").write_text(SCONTROL.replace("FOLDER", str(tmp_path)))
    (tmp_path / "scontrol").chmod(0o755)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PATH": f"{tmp_path}:/usr/bin:/bin"}.items():
        monkeypatch.setenv(name, value)
    drained = "node1 is MIXED+DRAIN (a broken GPU [root@2026])"
    assert restart.reasons(["node1.cluster", "node2"]) == [*reasons, drained]
    assert (tmp_path / "asked").read_text() == "show node --oneliner node1,node2\n"  # once for all nodes
