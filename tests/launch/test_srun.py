"""srun in the foreground, inside an allocation."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from hpclm.launch import srun
from tests.launch.launched import job_log, launched, left, ready, save, signals, warned, words
from tests.runs import PATIENCE, ROOT, until


def test_srun_gets_every_count():
    assert " ".join(srun.step(2, 4, 3, ["prog"], ["--overlap"])) == (
        "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=3 --overlap --kill-on-bad-exit=1 --export=ALL prog"
    )
    assert "--cpus-per-task" not in " ".join(srun.step(2, 4, 0, ["prog"]))


def test_outside_an_allocation_it_says_how_to_get_one(tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    code, _, errors = launched("srun", tmp_path, "job.nodes=2 job.gpus=4", "exit=0", env=env)
    assert code == 64 and "salloc --nodes=2 --ntasks-per-node=4 --gpus-per-node=4" in errors
    assert not (tmp_path / "logs").exists()


@pytest.fixture
def salloc(cluster):
    """Words that run a command in an allocation of two nodes with 4 GPUs and 2 CPUs each."""
    if not shutil.which("salloc"):
        pytest.skip("needs salloc")
    return ["salloc", "--time=60", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=4"]


def inside(cluster, salloc, out, settings, *acts):
    return cluster.run([*salloc, *words("srun", out, settings, *acts)], check=False, cwd=ROOT)


@pytest.mark.parametrize(
    "acts, code, told",
    [
        (["print=hello", "env=CUDA_VISIBLE_DEVICES"], 0, r"hello\n"),
        (["sleep=1:1", "exit=85"], 85, ""),
        (["ready", "meet=4", "kill=3:9", "obey"], 137, r"task 3: Killed"),
        (["ready", "meet=4", "exit=1:93", "obey"], 93, r"task 1: Exited with exit code 93"),
    ],
)
def test_ranks_run_on_all_nodes_and_their_ends_come_through(cluster, salloc, tmp_path, acts, code, told):
    done = inside(cluster, salloc, tmp_path, "job.nodes=2 job.gpus=2", *acts)
    assert done.returncode == code, done.stderr
    log = job_log(tmp_path)
    assert re.search(told, log) and "4 processes, 2 on each of 2 nodes" in log
    if code == 0:
        shown = [line.split() for line in log.splitlines() if "CUDA_VISIBLE_DEVICES" in line]
        assert sorted(line[0] for line in shown) == ["0", "1", "2", "3"] and len({line[1] for line in shown}) == 2
        assert {line[2] for line in shown} == {"CUDA_VISIBLE_DEVICES=0,1,2,3"}
    until(lambda: not left(tmp_path), "the end of all processes")


def test_a_warning_reaches_every_rank_and_all_may_save(cluster, salloc, tmp_path):
    command = [*salloc, *words("srun", tmp_path, "job.nodes=2 job.gpus=2", "ready", "warned")]
    options = {"cwd": ROOT, "env": cluster.env, "stdin": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    ready(tmp_path, 4)
    launchers = [pid for pid in left(tmp_path) if is_launcher(pid)]
    os.kill(min(launchers), signal.SIGTERM)
    warned(tmp_path, 4)
    received = signals(tmp_path, 4)
    save(tmp_path)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85, errors
    assert [set(got) for got in received] == [{"SIGUSR1"}] * 4  # Slurm sends it to every process of a step


def is_launcher(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        found = file.read().split("\0")
    return found[0] == sys.executable and "launch" in found


def test_an_allocation_that_is_too_small_is_refused_by_srun(cluster, salloc, tmp_path):
    done = inside(cluster, salloc, tmp_path, "job.nodes=3 job.gpus=8", "exit=0")
    assert done.returncode and "srun: error" in done.stderr and not (tmp_path / "ready-0").exists()
