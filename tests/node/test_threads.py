import os

import pytest

from hpclm.node import threads

MINE = os.sched_getaffinity(0)
CORES = os.cpu_count()


@pytest.mark.parametrize(
    "local_size, env, count",
    [
        (1, {}, len(MINE)),
        (2, {}, max(1, len(MINE) // 2)),
        (1000, {}, 1),
        (2, {"OMP_NUM_THREADS": "7"}, 7),
        (2, {"OMP_NUM_THREADS": "3,2"}, 3),
        (2, {"OMP_NUM_THREADS": ""}, max(1, len(MINE) // 2)),
        (2, {"SLURM_CPUS_PER_TASK": "1"}, 1),
        (1, {"SLURM_CPUS_PER_TASK": "10000"}, len(MINE)),  # it has no more than it may run on
        (2, {"SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": str(CORES)}, max(1, len(MINE) // 2)),
        # srun gave each task a part of the job's cores
        (2, {"SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": str(CORES + 1)}, max(1, len(MINE) // 2)),
    ],
)
def test_threads_are_as_the_user_set_or_a_fair_share(local_size, env, count, tmp_path):
    assert threads.per_process(local_size, env, tmp_path) == count


def test_hyperthreads_of_one_core_count_once(tmp_path):
    for core in range(8):
        path = tmp_path / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{core % 4},{core % 4 + 4}\n")
    assert threads.physical([0, 1, 4, 5, 6], tmp_path) == 3


def test_a_process_is_bound_if_srun_or_mpirun_gave_it_a_part_of_the_jobs_cores():
    env = {"OMPI_COMM_WORLD_RANK": "0"}
    assert not threads.bound(range(CORES), env)
    assert threads.bound(range(CORES - 1), env)
    assert not threads.bound(range(CORES - 1), {})  # a taskset around all of them
    assert not threads.bound(range(CORES - 1), env | {"TORCHELASTIC_RUN_ID": "x"})
