"""What the variables of Slurm say."""

import pytest

from hpclm.node.slurm import expand, own_job, tasks_per_node

BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node1", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a,b[1-2]", "a"),
        ("r[1-2]n[03,05]", "r1n03"),
        ("gpu[3]-ib,x", "gpu3-ib"),
    ],
)
def test_rank_0_is_on_the_first_host_of_a_node_list(nodes, first):
    assert expand(nodes)[0] == first


def test_task_counts_are_written_out():
    assert tasks_per_node("4(x2),3") == [4, 4, 3] and tasks_per_node("8") == [8]


def test_a_job_is_named_as_squeue_names_it():
    assert own_job({}) is None and (own_job(BATCH).scheduler, own_job(BATCH).id) == ("Slurm", "7")
    assert own_job(BATCH | {"SLURM_RESTART_COUNT": ""}).restart == own_job(BATCH).restart == 0
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"}
    task = own_job(BATCH | array)
    assert (task.id, task.array_task, task.restart) == ("5_3", "3", 1)


@pytest.mark.parametrize(
    "launcher", [{}, {"TORCHELASTIC_RUN_ID": "7"}, {"OMPI_COMM_WORLD_RANK": "0"}, {"MPI_LOCALRANKID": "0"}]
)
def test_a_node_has_the_name_that_slurm_knows_whatever_started_the_process(launcher, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "gpu08.cluster.local")
    first = "gpu07" if "MPI_LOCALRANKID" in launcher else "gpu08"  # as MPICH hands it on
    env = BATCH | launcher | {"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURMD_NODENAME": first}
    assert own_job(env).node == "gpu08"
    assert own_job(env | {"SLURM_JOB_NODELIST": "gpu07", "SLURMD_NODENAME": "login1"}).node == "gpu08.cluster.local"


def test_a_job_has_its_nodes_and_the_end_of_its_time():
    job = own_job(BATCH | {"SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_END_TIME": "1780000000"})
    assert (job.hosts, job.deadline) == (("gpu07", "gpu08"), 1780000000.0)
    assert str(job).startswith("job 7 of Slurm, on gpu07, gpu08, until 2026-0")
    assert (own_job(BATCH).hosts, own_job(BATCH).deadline) == ((), None)
