"""Why a job was started again, according to the run's summary and to Slurm."""

from hpclm.distributed import restart
from hpclm.distributed.context import single
from hpclm.training import records

SCONTROL = """#!/bin/sh
echo $* >> FOLDER/asked
echo 'NodeName=node1 Arch=x86_64 State=MIXED+DRAIN Reason=a broken GPU [root@2026]'
echo 'NodeName=node2 Arch=x86_64 State=IDLE'
"""


def test_a_job_that_slurm_started_again_says_how_the_last_start_ended_and_what_its_nodes_suffer_from(
    tmp_path, monkeypatch
):
    (tmp_path / "attempts.jsonl").write_text('{"hosts": ["node1.cluster", "node2"]}\n')
    (tmp_path / "scontrol").write_text(SCONTROL.replace("FOLDER", str(tmp_path)))
    (tmp_path / "scontrol").chmod(0o755)
    context = single()
    context.launcher = "Slurm"
    assert records.tell_restart(tmp_path, context, "done at step 5") == "done at step 5"
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PATH": f"{tmp_path}:/usr/bin:/bin"}.items():
        monkeypatch.setenv(name, value)
    told = records.tell_restart(tmp_path, context, "rank 1 on node1 was killed")
    drained = "node1 is MIXED+DRAIN (a broken GPU [root@2026])"
    assert told == f"start 2 of job 7; why the last one ended: rank 1 on node1 was killed; {drained}"
    assert (tmp_path / "asked").read_text() == "show node --oneliner node1,node2\n"  # once for all nodes
    assert not restart.abandoned({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PATH": "/nowhere"})
