"""Ranks that torchrun's agents start again inside a Slurm allocation, on a real Slurm."""

import os
import signal

import pytest

from tests.events import began
from tests.runs import command_of, lines
from tests.slurm import until
from tests.test_preemption import Job

pytestmark = pytest.mark.slurm
WORDS = ["budget.steps=1000000", "optim.schedule=constant", "job.template=torchrun", "job.requeue=false"]
AGENT = command_of("hpclm.launch.torchrun")


def attempts(job):
    return began(job.out)


def ranks_by_node(job):
    found = {}
    for rank in job.ranks():
        found.setdefault(rank.node, []).append(rank.pid)
    return found


def wait_for_a_checkpoint(job):
    """Step 5 is saved beside step 6, and what is killed before that is published begins anew."""
    job.wait_for_step(6)
    until((job.out / "checkpoints/latest").exists, "a checkpoint", job.cluster)


def number_of(pid):
    with open(f"/proc/{pid}/environ") as file:
        return int(dict(word.split("=", 1) for word in file.read().split("\0") if "=" in word)["RANK"])


def wait_for_the_next_step(job, starts):
    """Wait until start number ``starts`` has done a step."""

    def rows_since():
        return [row for row in lines(job.out / "metrics.jsonl") if row.endswith("}")]

    until(lambda: len(attempts(job)) == starts, f"start {starts}\n{job.log()[-3000:]}", job.cluster)
    before = len(rows_since())
    until(lambda: len(rows_since()) > before, "a step", job.cluster)


def test_a_rank_killed_on_the_second_node_is_started_again_until_no_restart_is_left(cluster, tmp_path):
    job = Job(cluster, tmp_path / "run", 2, 2, *WORDS, "job.restarts=1")
    wait_for_a_checkpoint(job)
    second = sorted(ranks_by_node(job))[1]
    doomed = ranks_by_node(job)[second][1]
    rank = number_of(doomed)
    os.kill(doomed, signal.SIGKILL)
    wait_for_the_next_step(job, 2)
    why = f"restart 1 of 1: rank {rank} on {second} (pid "
    [told] = [line for line in lines(job.out / "log.txt") if why in line]
    assert "left no message: killed" in told
    first, again = attempts(job)
    assert "after" not in first and again["after"].startswith(why) and "left no message: killed" in again["after"]
    assert again["from_step"] >= 5 and again["hosts"] == first["hosts"]
    job.wait_for_step(job.step() + 2)
    os.kill(ranks_by_node(job)[second][0], signal.SIGKILL)
    assert cluster.wait(job.id) == "FAILED"
    assert cluster.show(job.id)["ExitCode"] in ("85:0", "137:0") and len(attempts(job)) == 2
    until(lambda: not job.ranks(), "the end of all ranks", cluster)


@pytest.mark.whole
def test_when_the_first_node_s_agent_is_killed_the_job_is_put_back_into_the_queue(cluster, tmp_path):
    job = Job(cluster, tmp_path / "run", 2, 1, *WORDS, "job.restarts=2", "job.requeue=true")
    wait_for_a_checkpoint(job)
    host = cluster.show(job.id)["BatchHost"]
    for process in [*cluster.processes(AGENT), *job.ranks()]:
        if process.node == host:
            os.kill(process.pid, signal.SIGKILL)
    job.wait_for_restart(1)
    job.wait_for_attempt(2)
    assert attempts(job)[1]["from_step"] >= 5 and len(attempts(job)[1]["hosts"]) == 2
