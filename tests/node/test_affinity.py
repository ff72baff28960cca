import json
import os
import subprocess
import sys

import pytest

from hpclm.errors import ConfigError
from hpclm.node import affinity, hardware

MINE = os.sched_getaffinity(0)
CORES = os.cpu_count()


@pytest.fixture
def machine(tmp_path):
    """A /sys with two NUMA nodes, a GPU near the second, two threads a core."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    write("devices/system/node/node0/cpulist", "0")
    write("devices/system/node/node1/cpulist", f"1-{max(1, CORES - 1)}")
    write("devices/system/node/node2/cpulist", "")  # memory only
    write("bus/pci/devices/0000:17:00.0/local_cpulist", "1")
    for core in range(8):
        write(f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{core % 4},{core % 4 + 4}")
    return tmp_path


@pytest.mark.parametrize(
    "local_size, env, threads",
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
def test_threads_are_as_the_user_set_or_a_fair_share(local_size, env, threads, tmp_path):
    assert affinity.threads(local_size, env, tmp_path) == threads


def test_a_container_with_a_cpu_quota_gets_fewer_threads(tmp_path):
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text("100000 100000\n")
    assert affinity.threads(1, {}, tmp_path) == 1
    (tmp_path / "fs/cgroup/cpu.max").write_text("max 100000\n")
    assert affinity.quota(tmp_path) == float("inf")


def test_hyperthreads_of_one_core_count_once(machine):
    assert affinity.physical([0, 1, 4, 5, 6], machine) == 3


@pytest.mark.parametrize("text, cores", {"0-3,8": [0, 1, 2, 3, 8], "": [], "5\n": [5]}.items())
def test_lists_of_cores_are_parsed(text, cores):
    assert affinity.cores_of(text) == cores
    if cores:
        assert affinity.described(cores).split(" ")[1] == text.strip()


NODES = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "local_size, allowed, shares",
    [
        (1, range(8), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, range(8), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, range(8), [[0, 1], [2, 3], [4, 5, 6, 7]]),
        (8, range(8), [[0, 1]] * 2 + [[2, 3]] * 2 + [[4, 5]] * 2 + [[6, 7]] * 2),
        (2, [1, 2], [[1], [2]]),  # the job has some cores of two nodes only
    ],
)
def test_processes_share_numa_nodes_and_no_core_is_left(local_size, allowed, shares):
    assert [affinity.share(rank, local_size, allowed, NODES) for rank in range(local_size)] == shares


@pytest.mark.skipif(not {0, 1} <= MINE, reason="needs cores 0 and 1")
@pytest.mark.parametrize(
    "words, env, said, cores",
    [
        ((0, 2), {}, "core 0, its share of the NUMA nodes", [0]),
        ((0, 2, "0000:17:00.0"), {}, "core 1, near GPU 0000:17:00.0", [1]),
        ((0, 2, "0000:99:00.0"), {}, "core 0, its share of the NUMA nodes", [0]),
        ((0, 1), {}, "not bound: the only process on this host", sorted(MINE)),
        ((0, 2), {"SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": "1"}, "core 0", [0]),  # all that the job has
    ],
)
def test_a_process_and_its_threads_are_bound(words, env, said, cores, machine):
    code = (
        "import sys, json, os, threading, time; from pathlib import Path; from hpclm.node import affinity\n"
        "threading.Thread(target=time.sleep, args=(2,), daemon=True).start()\n"
        "words, env, system = json.loads(sys.argv[1])\n"
        "said = affinity.bind(*words, env=env, system=Path(system))\n"
        "tasks = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir('/proc/self/task')]\n"
        "print(json.dumps([said, tasks]))\n"
    )
    told = json.dumps([words, env, str(machine)])
    done = subprocess.run([sys.executable, "-c", code, told], capture_output=True, text=True, check=True, timeout=60)
    text, tasks = json.loads(done.stdout)
    assert said in text and tasks == [cores, cores]


def test_nothing_is_bound_with_one_numa_node_or_a_launcher_that_binds(tmp_path):
    assert "one NUMA node" in affinity.bind(0, 2, system=tmp_path)
    assert os.sched_getaffinity(0) == MINE
    env = {"OMPI_COMM_WORLD_RANK": "0"}
    assert not affinity.bound(range(CORES), env)
    assert affinity.bound(range(CORES - 1), env)
    assert not affinity.bound(range(CORES - 1), {})  # a taskset around all of them
    assert not affinity.bound(range(CORES - 1), env | {"TORCHELASTIC_RUN_ID": "x"})


@pytest.mark.parametrize(
    "local_rank, local_size, gpus, visible, device",
    [(3, 4, 4, "0,1,2,3", 3), (3, 4, 8, None, 3), (3, 4, 1, "3", 0), (0, 1, 1, None, 0), (0, 1, 8, None, 0)],
)
def test_each_process_has_its_own_gpu(local_rank, local_size, gpus, visible, device):
    assert hardware.gpu_of(local_rank, local_size, gpus, visible) == device


@pytest.mark.parametrize(
    "gpus, visible, said",
    [
        (2, "4,5", "there are 2 GPUs for them (CUDA_VISIBLE_DEVICES=4,5); start 2 on each node, ask for 4 GPUs"),
        (1, None, "1 GPU"),
    ],
)
def test_fewer_gpus_than_processes_are_refused(gpus, visible, said):
    with pytest.raises(ConfigError, match="4 processes run on ") as refused:
        hardware.gpu_of(0, 4, gpus, visible)
    assert said in str(refused.value)
