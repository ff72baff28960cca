"""Preemption end to end on a real Slurm: whatever ends a start of a job, the job continues as if nothing had happened."""

import json
import os
import random
import signal
import time

import pytest

from tests.events import began, note, of_kind
from tests.forks import Ranks, hpclm
from tests.runs import ROOT, command_of, figures, lines, losses
from tests.slurm import ENDED, until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
EVERY = 5  # steps between saves
RUN = ["configs/debug.yaml", "engine.device=cpu", "log.tensorboard=false", f"checkpoint.every={EVERY}"]
RUN += ["model.dropout=0.1", "evaluate.every=20", "evaluate.batches=2", "batch.micro_size=4"]
RANK = command_of("hpclm.train")


def uninterrupted(folder, size, *words):
    """Losses in hex, by step, of ``size`` processes that nobody disturbs."""
    with Ranks(size, [*RUN, *words, f"out={folder}"]) as ranks:
        assert {code for code, _ in ranks.wait().values()} == {0}
    return losses(folder)


class Job:
    """A job that hpclm submit has sent; knows how far it is."""

    def __init__(self, cluster, out, nodes, each, *words, minutes=30):
        self.cluster, self.out = cluster, out
        # alone, because a run looks through the whole package of such a module
        (out.parent / "own.py").write_text("from tests.faults import *\n")
        self.env = {**cluster.env, "OMP_NUM_THREADS": "1", "HPCLM_SITE": "", "PYTHONPATH": f"{out.parent}:{ROOT}"}
        self.env["TEST_PAUSE"] = "0.02"  # two to four times in a step: the run lasts, and computes little
        words = [*RUN, "model.block=own:SlowBlock", "job.warn_seconds=60", f"out={out}", *words]
        submit = ["submit", "--nodes", nodes, "--gpus", each, "--time", minutes]
        self.id = self.hpclm(*submit, *words).stdout.split()[1].rstrip(":")

    def hpclm(self, *words):
        return hpclm(*words, env=self.env, check=0)

    def step(self):
        rows = lines(self.out / "metrics.jsonl")
        return max((json.loads(row)["step"] for row in rows if row.endswith("}")), default=0)

    def ranks(self):
        """Processes of this run, over all nodes."""
        return [p for p in self.cluster.processes(RANK) if f"{self.out}/" in p.words]

    def log(self):
        return (self.out / f"logs/job-{self.id}.log").read_text()

    def alive(self):
        """What Slurm knows of the job; an error when it is over. For a moment a job on its way back into the queue is FAILED."""
        until_then = time.monotonic() + 60
        while (shown := self.cluster.show(self.id))["JobState"] in ENDED and time.monotonic() < until_then:
            time.sleep(0.2)
        assert shown["JobState"] not in ENDED, f"{shown}\n{self.log()}"
        return shown

    def wait_for_step(self, step, restarts=None):
        """Wait until the run, in its start number ``restarts``, has done ``step``."""

        def there():
            shown = self.alive()
            started = restarts is None or int(shown["Restarts"]) == restarts
            return (
                started and shown["JobState"] == "RUNNING" and self.attempts() > (restarts or 0) and self.step() >= step
            )

        until(there, f"step {step}", self.cluster)

    def ends(self):
        """How attempts ended, without the rows of the job's supervisor."""
        return [event for event in of_kind(self.out, "ended") if event.get("state")]

    def attempts(self):
        return len(began(self.out))

    def wait_for_attempt(self, number):
        until(lambda: self.attempts() == number, f"attempt {number}", self.cluster)

    def wait_for_restart(self, number):
        """Wait until Slurm has put the job into the queue again, for the ``number``-th time, and it has started."""

        def again():
            shown = self.alive()
            return int(shown["Restarts"]) >= number and shown["JobState"] == "RUNNING"

        until(again, f"restart {number}", self.cluster)

    def finish(self):
        def over():
            shown = self.cluster.show(self.id)
            return shown["JobState"] in ENDED and shown

        shown = until(over, "end", self.cluster)
        assert shown["JobState"] == "COMPLETED", self.log()


def one(number):
    """Send a signal to one rank, which the draw chooses."""
    return lambda job, draw: os.kill(draw.choice(job.ranks()).pid, number)


def everyone(name):
    return lambda job, draw: job.cluster.run(["scancel", f"--signal={name}", job.id])


def twice(job, draw):
    rank = draw.choice(job.ranks()).pid
    for number in (signal.SIGUSR2, signal.SIGUSR1):
        os.kill(rank, number)
        time.sleep(0.05)


def requeue(job, draw):
    job.cluster.run(["scontrol", "requeue", job.id])


def preempt(job, draw):
    """A job of a partition that goes first takes all nodes for a moment."""
    high = job.cluster.batch("sleep 0.1", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null")
    job.cluster.wait(high)


# what ends a start of the job -> whether it can save before that
FAULTS = {
    "TERM to one rank": (one(signal.SIGTERM), True),
    "preemption by another partition": (preempt, False),  # Slurm gives KillWait, 5 s here
    "USR1 to all": (everyone("USR1"), True),
    "scontrol requeue": (requeue, False),
    "USR2 and USR1 to one rank": (twice, True),
    "TERM to all": (everyone("TERM"), True),
    "KILL of one rank": (one(signal.SIGKILL), False),
}


def disturb(job, names, draw):
    """End starts of the job in these ways, one after another; how many steps each has cost."""
    lost = []
    for number, name in enumerate(names):
        act, saves = FAULTS[name]
        job.wait_for_step(job.step() + draw.randint(1, 2 * EVERY), number)
        act(job, draw)
        job.wait_for_restart(number + 1)
        job.wait_for_attempt(number + 2)
        attempts = began(job.out)
        before = job.ends()
        lost.append((name, attempts[-1]["from_step"]))
        if saves:
            assert before and before[-1]["step"] == attempts[-1]["from_step"], (name, before, job.log())
            why = f"start {number + 2} of job {job.id}; why the last one ended: {before[-1]['ending']}"
            assert why in (job.out / "log.txt").read_text()
        if act is preempt:
            assert "srun ended with exit code 85: Slurm ends it: preemption" in job.log()
    return lost


OFTEN = ["preemption by another partition", "USR1 to all"]  # without and with time to save


@pytest.mark.parametrize(
    "names, tasks",
    [
        pytest.param(OFTEN, 1, marks=pytest.mark.always),
        *(pytest.param([*FAULTS] * rounds, 2, marks=pytest.mark.whole) for rounds in (1, 3)),
    ],
    ids=lambda value: len(value) if isinstance(value, list) else f"{value} a node",
)
def test_a_job_that_is_ended_in_every_way_learns_what_an_undisturbed_one_does(cluster, tmp_path, names, tasks):
    budget = f"budget.steps={50 + 25 * len(names)}"  # a busy machine lets it go on before it is disturbed
    if tasks == 1:
        expected = uninterrupted(tmp_path / "alone", 2, budget)
    else:
        # the order of gloo's sums of four is the nodes', too
        alone = Job(cluster, tmp_path / "alone", 2, tasks, budget)
        alone.finish()
        expected = losses(alone.out)
    job = Job(cluster, tmp_path / "run", 2, tasks, budget, "job.partition=low")
    disturb(job, names, random.Random(len(names)))
    job.finish()
    assert int(cluster.show(job.id)["Restarts"]) == len(names)  # each was one requeue, no more
    assert losses(job.out) == expected


def test_a_job_that_starts_again_on_another_number_of_nodes_learns_the_same(cluster, tmp_path):
    expected = uninterrupted(tmp_path / "alone", 4, "budget.steps=60")
    words = ["budget.steps=60", "checkpoint.file_mb=0"]
    job = Job(cluster, tmp_path / "run", 2, 2, *words, f"checkpoint.keep_every={EVERY}")
    job.wait_for_step(7)
    cluster.run(["scontrol", "requeue", job.id])
    cluster.wait(job.id, "PENDING")
    cluster.run(["scontrol", "update", f"jobid={job.id}", "numnodes=1", "numtasks=2"])
    job.finish()
    sizes = [event["size"] for event in began(job.out)]
    assert sizes == [4, 2]
    checkpoints = sorted((job.out / "checkpoints").glob("step-*"))
    names = [
        sorted({file.name for file in folder.iterdir()} - {"MANIFEST.json"})
        for folder in (checkpoints[0], checkpoints[-1])
    ]
    assert names == [[f"rank-{n:05d}.safetensors" for n in range(size)] for size in (4, 2)]
    found = {step: float.fromhex(loss) for step, loss in losses(job.out).items()}
    assert found == pytest.approx({step: float.fromhex(loss) for step, loss in expected.items()}, abs=1e-5)


@pytest.mark.whole
def test_what_slurm_has_given_up_but_not_killed_cannot_publish_and_ends_itself(cluster, tmp_path):
    """A slurmd hangs, its ranks live on; Slurm starts the job again on another node."""
    if not cluster.isolated:
        pytest.skip("nodes that share this machine's processes have no separate slurmd to kill")
    expected = uninterrupted(tmp_path / "alone", 2, "budget.steps=300")
    job = Job(cluster, tmp_path / "run", 1, 2, "budget.steps=300")
    job.wait_for_step(7)
    (node,) = {rank.node for rank in job.ranks()}
    zombies = {rank.pid for rank in job.ranks()}
    slurmd = cluster.slurmd(node)
    os.kill(slurmd, signal.SIGSTOP)
    try:
        cluster.down(node)  # or half a minute later by itself
        job.wait_for_restart(1)
        assert zombies <= {rank.pid for rank in job.ranks()}
        until(lambda: not zombies & {rank.pid for rank in job.ranks()}, "end of the old ranks", cluster)
        job.finish()
    finally:
        os.kill(slurmd, signal.SIGCONT)
    assert losses(job.out) == expected
    assert "was taken over by" in (job.out / "log.txt").read_text()


@pytest.mark.whole
def test_a_slurmctld_that_is_away_while_a_run_leaves_starts_it_again_when_it_is_back(cluster, tmp_path):
    expected = uninterrupted(tmp_path / "alone", 2, "budget.steps=300")
    job = Job(cluster, tmp_path / "run", 1, 2, "budget.steps=300")
    job.wait_for_step(7)
    time.sleep(10)  # slurmctld saves what has changed within 5 s
    slurmctld = int((cluster.folder / "run" / "slurmctld.pid").read_text())
    os.kill(slurmctld, signal.SIGKILL)
    try:
        before = job.step()
        until(lambda: job.step() > before, "step without slurmctld", cluster)
        os.kill(job.ranks()[0].pid, signal.SIGTERM)
        until(lambda: not job.ranks(), "end of the ranks", cluster)
        time.sleep(15)  # in which the script has asked in vain
    finally:
        cluster.repair()
    job.finish()
    assert int(cluster.show(job.id)["Restarts"]) == 1
    assert losses(job.out) == expected


@pytest.mark.whole  # Slurm counts a job's time in minutes
def test_a_run_leaves_before_its_time_is_up_and_is_started_again(cluster, tmp_path):
    job = Job(cluster, tmp_path / "run", 1, 2, "budget.steps=100000", "job.warn_seconds=30", minutes=2)
    job.wait_for_restart(1)
    row = job.ends()[0]
    assert row["code"] == 85 and row["step"] > 0
    assert "TIMEOUT" not in job.log() and "DUE TO TIME LIMIT" not in job.log()
    assert "srun ended with exit code 85: the job's time limit" in job.log()
    job.wait_for_step(row["step"] + 1, 1)
    assert "saved and ended" in job.hpclm("request", job.out, "stop").stdout
    job.finish()


def test_a_job_that_comes_to_no_checkpoint_is_not_started_for_ever(cluster, tmp_path):
    words = ["budget.steps=50", "data.source=own:killing", "--sbatch", "hold"]
    job = Job(cluster, tmp_path / "run", 1, 2, *words)
    for _ in range(2):  # starts that came to nothing
        note(job.out, "began", job_id=job.id, from_step=0)
    cluster.run(["scontrol", "release", job.id])
    job.wait_for_restart(1)
    assert cluster.wait(job.id) == "FAILED"
    assert cluster.show(job.id)["ExitCode"] == "93:0", job.log()
    assert "has started 3 times from step 0 and never reached a checkpoint" in (job.out / "log.txt").read_text()


def test_the_switches_work_from_another_machine(cluster, tmp_path):
    job = Job(cluster, tmp_path / "run", 2, 2, "budget.steps=100000", "checkpoint.every=100000")
    job.wait_for_step(3)
    assert "saving" in job.hpclm("request", job.out, "save").stdout
    until(lambda: list((job.out / "checkpoints").glob("step-*")), "a checkpoint", cluster)
    before = job.step()
    job.wait_for_step(before + 3)
    job.hpclm("request", job.out, "stop")
    job.finish()
    saved = sorted(int(path.name[5:]) for path in (job.out / "checkpoints").glob("step-*"))
    assert len(saved) == 2 and saved[-1] == job.step()
    assert not (job.out / "stop").exists() and not (job.out / "save-now").exists()
    assert figures(job.out, "step", "loss")[-1][0] == job.step()


@pytest.mark.parametrize("name, state, code", [("Stops", "COMPLETED", "0:0"), ("Breaks", "FAILED", "93:0")])
def test_a_job_that_a_callback_ends_is_saved_and_not_requeued(cluster, tmp_path, name, state, code):
    callback = f"train.callbacks=[tests.training.own_callbacks:{name}]"
    job = Job(cluster, tmp_path / "run", 1, 2, "budget.steps=100000", "checkpoint.every=100000", callback)
    assert cluster.wait(job.id) == state, job.log()
    shown = cluster.show(job.id)
    assert (shown["ExitCode"], shown["Restarts"]) == (code, "0"), job.log()
    assert [path.name for path in (job.out / "checkpoints").glob("step-*")] == ["step-00000008"]
