"""What is killed of Slurm's own around a run: its slurmstepd, srun, the job's script, a node; and what the run's log says."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.diagnostics import flips
from tests.events import began, note, of_kind
from tests.runs import ROOT, command_of, lines
from tests.slurm import until
from tests.test_preemption import Job

pytestmark = pytest.mark.slurm
ENDLESS = ["budget.steps=1000000", "optim.schedule=constant"]


def kill(cluster, pattern, number=signal.SIGKILL):
    """Kill the processes on the cluster's nodes whose command line begins so; slurmstepd too."""
    found = [process.pid for process in cluster.everything(pattern)]
    assert found, pattern
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it ended with the one before: srun and its helper
            os.kill(pid, number)


def told(job, number):
    """What log.txt says of why start ``number - 1`` ended."""
    begins = f"start {number} of job {job.id}; why the last one ended: "
    return [line.partition(begins)[2] for line in lines(job.out / "log.txt") if begins in line]


def trains(job, number):
    """Whether start ``number`` has done a step: metrics.jsonl may still have those of the one before it, which saved nothing."""
    said = (job.out / "log.txt").read_text().partition(f"start {number} of job {job.id}; why")[2]
    return re.search(r" I step \d+/", said) is not None


def test_a_run_starts_again_when_srun_or_the_script_is_killed_and_its_log_says_what_slurm_says_of_it(cluster, tmp_path):
    job = Job(cluster, tmp_path / "run", 2, 1, *ENDLESS)
    job.wait_for_step(2)
    kill(cluster, rf"srun .*{job.out}/")
    until(lambda: trains(job, 2), "a step of the second start", cluster)
    [why] = told(job, 2)
    assert "SIGTERM: saved at step " in why or "killed" in why  # whichever Slurm leaves time for
    assert "srun ended with exit code " in job.log()
    before = job.step()
    kill(cluster, rf"\S*python\S* .*hpclm.launch.job {job.out}/")
    job.wait_for_attempt(3)
    assert len(told(job, 3)) == 1 and "SIGTERM: saved at step " in told(job, 3)[0]
    assert "the job's script was killed (JobLaunchFailure): Slurm was asked" in (job.out / "log.txt").read_text()
    assert began(job.out)[-1]["from_step"] >= before  # it got the signal, and saved
    assert int(cluster.show(job.id)["Restarts"]) == 2


@pytest.mark.whole  # to start again without a lost node is tried below; how a node that lost its power is noticed, in tests/test_launch.py
def test_a_run_starts_again_without_a_node_that_lost_its_power_and_its_log_says_so(cluster, tmp_path):
    job = Job(cluster, tmp_path / "run", 2, 1, *ENDLESS)
    job.wait_for_step(2)
    nodes = {rank.node for rank in job.ranks()}
    lost = cluster.show(job.id)["BatchHost"]
    cluster.power_off(lost)
    cluster.down(lost)  # or half a minute later by itself
    job.wait_for_attempt(2)
    assert lost in nodes and f"{lost} is DOWN" in told(job, 2)[0] and "test" in told(job, 2)[0]
    assert int(cluster.show(job.id)["Restarts"]) == 1


@pytest.mark.whole
@pytest.mark.parametrize("template", ["srun", "torchrun"])
def test_a_run_starts_again_without_the_node_on_which_bits_flipped(template, cluster, tmp_path):
    if not cluster.isolated:
        pytest.skip("needs nodes with host names")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(flips.SITE)
    own = [f"job.env={{TEST_FLIPPED: {tmp_path}/flipped, PYTHONPATH: '{site}:{tmp_path}:{ROOT}'}}"]
    words = [
        "model.block=gpt",
        "batch={global_size: 6, micro_size: 2}",
        f"job.template={template}",
    ]  # no code of one's own
    job = Job(cluster, tmp_path / "run", 3, 1, *own, *words)
    job.finish()
    first, second = began(job.out)
    [row] = of_kind(job.out, "corrupt")
    assert row["bad"] == [first["hosts"][1]] and row["step"] == 10 and second["from_step"] == 5
    assert set(second["hosts"]) == set(cluster.nodes) - set(row["bad"])
    assert cluster.show(job.id)["ExcNodeList"] == row["bad"][0] and cluster.show(job.id)["Restarts"] == "1"
    [why] = told(job, 2)
    assert f"silent corruption detected after step 10: rank 1 on {row['bad'][0]}" in why
    assert f"Slurm was asked to start the job again without {row['bad'][0]}" in why


def kill_ranks(cluster, job, node):
    """All ranks of a node at once, as the kernel does when it has no memory left."""
    for rank in job.ranks():
        if rank.node == node:
            os.kill(rank.pid, signal.SIGKILL)


def kill_with_slurmstepd(cluster, job, node):
    """The same, and nobody is left to tell Slurm."""
    step = [each.pid for each in cluster.everything(rf"slurmstepd: \[{job.id}\.0\]") if each.node == node]
    for pid in [*step, *(rank.pid for rank in job.ranks() if rank.node == node)]:
        os.kill(pid, signal.SIGKILL)


def crash(cluster, job, node):
    """The whole node; its connections are closed or reset, unlike when its power is cut."""
    os.kill(int((cluster.folder / "run" / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    "template, lose",
    [
        ("srun", kill_ranks),
        *(pytest.param("srun", lose, marks=pytest.mark.whole) for lose in (kill_with_slurmstepd, crash)),
        pytest.param("torchrun", crash, marks=pytest.mark.whole),
        pytest.param("mpirun", crash, marks=[pytest.mark.whole, pytest.mark.mpi]),
    ],
)
def test_when_all_ranks_of_another_node_are_lost_at_once_the_log_names_them_and_the_job_starts_again(
    template, lose, cluster, tmp_path
):
    if not cluster.isolated:
        pytest.skip("needs nodes with separate process tables")
    nothing_exported = ["--sbatch", "export=NONE", "model.block=gpt"]
    nothing_exported += ["job.env={OMP_NUM_THREADS: '1', OF_JOB_ENV: '2'}"]
    job = Job(cluster, tmp_path / "run", 2, 2, *ENDLESS, f"job.template={template}", *nothing_exported)
    job.wait_for_step(2)
    for rank in job.ranks():
        assert variables(rank.pid).items() >= {"OF_JOB_ENV": "2", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}.items()
    (other,) = {rank.node for rank in job.ranks()} - {cluster.show(job.id)["BatchHost"]}
    lose(cluster, job, other)
    until(lambda: not job.ranks(), "end of all ranks", cluster)
    log = (job.out / "log.txt").read_text()
    if template != "mpirun":  # which leaves the ranks less than a second, and names the node itself
        assert f"ranks 2-3 on {other} left no message: killed" in log and log.count(" E ") == 1, log
    assert "socket.cpp" not in job.log()  # PyTorch's warnings of names that it cannot look up
    job.wait_for_attempt(2)
    assert int(cluster.show(job.id)["Restarts"]) >= 1


def variables(pid):
    """The environment of a process."""
    with open(f"/proc/{pid}/environ") as file:
        return dict(word.split("=", 1) for word in file.read().split("\0") if "=" in word)


@pytest.mark.whole
def test_a_lost_node_is_not_called_out_of_memory_once_slurm_knows_better(cluster, tmp_path):
    if not cluster.isolated:
        pytest.skip("nodes that share this machine cannot be switched off")
    job = Job(cluster, tmp_path / "run", 2, 1, *ENDLESS)
    job.wait_for_step(2)
    (lost,) = {rank.node for rank in job.ranks()} - {cluster.show(job.id)["BatchHost"]}
    cluster.power_off(lost)
    job.wait_for_attempt(2)
    log = (job.out / "log.txt").read_text()
    assert "memory" not in log and f"{lost} is DOWN" in told(job, 2)[0]


def test_a_job_whose_slurmstepd_was_killed_ends_when_its_run_has(cluster, tmp_path):
    if not cluster.isolated:
        pytest.skip("needs nodes with separate process tables")
    both = [
        Job(cluster, tmp_path / "one", 1, 2, *ENDLESS),
        Job(cluster, tmp_path / "two", 2, 1, *ENDLESS, "job.setup=[export SLURM_WAIT=3]"),
    ]
    for job in both:
        job.wait_for_step(1)
        kill(cluster, rf"slurmstepd: \[{job.id}\.0\]") if job.id == both[0].id else os.kill(
            cluster.everything(rf"slurmstepd: \[{job.id}\.0\]")[-1].pid, signal.SIGKILL
        )
        (job.out / "stop").touch()
    for job in both:
        assert cluster.wait(job.id) == "COMPLETED", job.log()
        assert (
            "(hpclm request RUN stop)" in (job.out / "log.txt").read_text() and cluster.show(job.id)["Restarts"] == "0"
        )


@pytest.mark.whole
def test_cancel_ends_what_slurm_s_signals_do_not_reach_and_jobs_whose_run_has_ended(cluster, tmp_path):
    if not cluster.isolated:
        pytest.skip("needs nodes with separate process tables")
    job = Job(cluster, tmp_path / "run", 1, 2, *ENDLESS, "checkpoint.every=0")
    job.wait_for_step(2)
    kill(cluster, rf"slurmstepd: \[{job.id}\.0\]")
    assert "saved at step " in job.hpclm("cancel", job.out).stdout
    assert not (job.out / "stop").exists() and not job.ranks()
    held = cluster.batch("trap '' TERM; srun sleep 9870 & wait; sleep 9870", "--output=/dev/null", "--requeue")
    cluster.wait(held, "RUNNING")  # the job of a run that has ended, and that does not
    note(job.out, **(of_kind(job.out, "submitted")[0] | {"job_id": held}))
    said = job.hpclm("cancel", job.out).stdout
    assert f"job {held}: its run has ended; the job itself is cancelled" in said
    assert cluster.state(held) == "CANCELLED"


def test_a_template_by_hand_counts_the_starts_of_a_run_wherever_its_directory_is(cluster, tmp_path):
    """The settings file lies elsewhere; the job loses a process while it trains."""
    words = ["configs/debug.yaml", "engine.device=cpu", *ENDLESS, f"out={tmp_path}/run"]
    env = {
        **cluster.env,
        "PATH": f"{Path(sys.executable).parent}:{cluster.env['PATH']}",
        "HPCLM_SITE": "",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--parsable", "--time=60", f"--output={tmp_path}/job-%j.log"]
    job = cluster.run(["sbatch", *options, ROOT / "slurm/srun.sbatch", *words], env=env, cwd=ROOT).stdout.strip()
    until(lambda: len(lines(tmp_path / "run/metrics.jsonl")) > 1, "step", cluster)
    kill(cluster, rf"{command_of('hpclm.train')}.*{tmp_path}/run")
    until(lambda: int(cluster.show(job)["Restarts"]) == 1, "restart", cluster)


@pytest.mark.whole
def test_of_a_template_by_hand_in_a_job_array_only_the_task_that_is_warned_starts_again(cluster, tmp_path):
    """Of the tasks, one has the number of the whole array."""
    words = ["configs/debug.yaml", "engine.device=cpu", "checkpoint.every=0", *ENDLESS]
    script = tmp_path / "array.sbatch"
    text = (ROOT / "slurm/srun.sbatch").read_text()
    script.write_text(text.replace("# Your set-up", f'set -- "$@" out={tmp_path}/run$SLURM_ARRAY_TASK_ID # set-up'))
    path = f"{Path(sys.executable).parent}:{cluster.env['PATH']}"
    env = {**cluster.env, "PATH": path, "HPCLM_SITE": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = ["--parsable", "--time=60", "--array=1-2", f"--output={tmp_path}/job-%A_%a.log"]
    array = cluster.run(["sbatch", *options, script, *words], env=env, cwd=ROOT).stdout.strip()
    for task in (1, 2):
        until(lambda task=task: len(lines(tmp_path / f"run{task}/metrics.jsonl")) > 1, "step", cluster)
    tasks = dict(line.split() for line in cluster.run(["squeue", "-h", "-r", "-o", "%A %K"]).stdout.splitlines())
    warned = tasks[array]
    other = next(job for job in tasks if job != array)
    cluster.run(["scancel", "--signal=USR2", f"{array}_{warned}"])
    until(lambda: len(began(tmp_path / f"run{warned}")) == 2, "second start", cluster)
    assert cluster.show(other)["Restarts"] == "0" and len(began(tmp_path / f"run{3 - int(warned)}")) == 1
