import json
import os
import subprocess
import sys

import pytest
import torch

from hpclm import config
from hpclm.node import hardware, threads
from tests.runs import ROOT

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


QUOTAS = {
    "version 2": ("0::/job\n", {"job/cpu.max": "300000 100000\n"}, 3),
    "no limit": ("0::/job\n", {"job/cpu.max": "max 100000\n"}, sys.maxsize),
    "of a group above": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, 2),
    "in a container": ("0::/docker/1\n", {"cpu.max": "50000 100000\n"}, 1),
    "no cgroups": ("", {}, sys.maxsize),
}


@pytest.mark.parametrize("groups, files, cores", QUOTAS.values(), ids=QUOTAS)
def test_a_quota_of_a_cgroup_limits_the_cores(groups, files, cores, tmp_path):
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs/cgroup" / name).write_text(text)
    assert threads.quota(tmp_path, tmp_path / "cgroup") == cores


def test_threads_workers_and_pytorch_follow_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "quota", lambda *_: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads.per_process(1, {}) == threads.usable() == 1
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        hardware.device(config.EngineConfig(device="cpu"), 0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


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


BOUND = """
import os
from hpclm.node import threads
threads.prepare()
import torch
torch.zeros(1 << 20).add_(1)
print(sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(len(MINE) < 2, reason="needs two cores")
def test_a_process_keeps_the_cores_of_its_launcher_whatever_openmp_s_variables_say():
    variables = {"OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": str(max(MINE))}
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", BOUND], env=env | variables, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"{sorted(MINE)}\n", done.stderr


PREPARED = """
import json, resource as r
from hpclm.node import threads
for limit, soft, hard in ((r.RLIMIT_CPU, SOFT, HARD), (r.RLIMIT_FSIZE, 1 << 20, -1), (r.RLIMIT_NOFILE, 32, 64), (r.RLIMIT_CORE, 0, -1)):
    r.setrlimit(limit, (soft, hard))
threads.prepare()
print(json.dumps([r.getrlimit(n) for n in (r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE, r.RLIMIT_CORE)]))
"""


@pytest.mark.parametrize("soft, hard, cpu", [(12, -1, [-1, -1]), (500, 500, [450, 500])])
def test_soft_limits_are_raised_to_the_hard_ones_and_time_to_save_is_left_before_that_of_cpu_time(soft, hard, cpu):
    code = PREPARED.replace("SOFT", str(soft)).replace("HARD", str(hard))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout) == [cpu, [-1, -1], [64, 64], [0, -1]]
