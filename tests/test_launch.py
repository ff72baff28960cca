"""The whole way, on a real Slurm: whatever starts the processes on two nodes, they train alike and end alike."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.forks import hpclm
from tests.runs import ROOT, command_of, figures, lines
from tests.slurm import until

TWO_BY_TWO = ["--nodes=2", "--ntasks-per-node=2"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def words(tmp_path):
    """Words of a run of the debug model in the directory `name`."""
    more = ["budget.steps=20", "evaluate.every=10", "log.tensorboard=false", "engine.device=cpu"]
    return lambda name, *others: [*more, f"out={tmp_path / name}", *others]


@pytest.fixture
def by_hand(cluster, tmp_path):
    """`sbatch slurm/TEMPLATE.sbatch WORDS`, on two nodes with two processes each; job id and log."""
    path = f"{Path(sys.executable).parent}:{cluster.env['PATH']}"
    env = {**cluster.env, "PATH": path, "OMP_NUM_THREADS": "1", "OMPI_MCA_btl": "self,tcp", "HPCLM_SITE": ""}

    def call(template, *words, options=()):
        log = tmp_path / f"{template}-{time.monotonic_ns()}.log"
        command = [
            "sbatch",
            "--parsable",
            "--time=60",
            f"--output={log}",
            *TWO_BY_TWO,
            *options,
            ROOT / f"slurm/{template}.sbatch",
        ]
        return cluster.run([*command, "configs/debug.yaml", *words], env=env, cwd=ROOT).stdout.strip(), log

    return call


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    more = ["budget.steps=20", "evaluate.every=10", "log.tensorboard=false", "engine.device=cpu"]
    hpclm("train", "configs/debug.yaml", *more, f"out={out}", check=0)
    return out


def same(out, alone):
    for key in ("loss", "grad_norm", "validation_loss"):
        expected, found = (figures(folder, "step", key) for folder in (alone, out))
        assert len(expected) > 1 and len(found) == len(expected)
        for row, other in zip(expected, found):
            assert other == pytest.approx(row, abs=1e-5)


DEEPSPEED = ["engine.name=deepspeed", "parallel.pipeline=2", "parallel.tensor=2"]


@pytest.mark.parametrize(
    "each, layout",
    [
        pytest.param(2, [], marks=pytest.mark.always),
        pytest.param(4, [], marks=pytest.mark.whole),
        pytest.param(1, DEEPSPEED[:2], marks=pytest.mark.whole),
        pytest.param(2, DEEPSPEED, marks=pytest.mark.whole),
        pytest.param(4, DEEPSPEED, marks=pytest.mark.whole),
        pytest.param(4, ["engine.name=fsdp2"], marks=pytest.mark.whole),
    ],
    ids=["native", "native of eight", "deepspeed", "deepspeed-2d", "deepspeed-3d", "fsdp2"],
)
def test_a_job_of_submit_learns_what_one_process_does(each, layout, cluster, words, alone, tmp_path):
    asked = ["--nodes", 2, "--gpus", each, "--time", 60]
    command = [sys.executable, "-m", "hpclm.submit", *asked, *words("sub mit", *layout)]
    env = {**cluster.env, "OMP_NUM_THREADS": "1", "HPCLM_SITE": ""}
    done = cluster.run(command, cwd=ROOT, env=env)
    job = done.stdout.split()[1].rstrip(":")
    assert cluster.wait(job) == "COMPLETED", Path(tmp_path / f"sub mit/logs/job-{job}.log").read_text()
    same(tmp_path / "sub mit", alone)
    status = hpclm("status", tmp_path / "sub mit", env=env).stdout
    assert "done" in status and f"{2 * each} ranks by Slurm" in status


SRUN, TORCHRUN = (pytest.param(name, marks=pytest.mark.whole) for name in ("srun", "torchrun"))
MPIRUN = pytest.param("mpirun", marks=pytest.mark.mpi)


@pytest.mark.parametrize("template", [SRUN, "torchrun", MPIRUN])  # submit uses srun's
def test_a_template_by_hand_learns_what_one_process_does(template, by_hand, cluster, words, alone, tmp_path):
    job, log = by_hand(template, *words(template))
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    same(tmp_path / template, alone)


RANKS = {"srun": "SLURM_PROCID", "torchrun": "RANK", "mpirun": "OMPI_COMM_WORLD_RANK"}


def training(cluster):
    """Processes of ranks, whatever started them."""
    return [p for p in cluster.processes(command_of("hpclm.train")) if "configs/debug.yaml" in p.words]


def is_rank(pid, template, rank):
    return f"{RANKS[template]}={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def wait_for_step_3(cluster, job, out, log):
    def there():
        assert cluster.state(job) in ("PENDING", "RUNNING"), log.read_text()
        return any('"step": 3,' in line for line in lines(out / "metrics.jsonl"))

    until(there, "step 3", cluster)


@pytest.mark.parametrize(
    "template", ["srun", TORCHRUN, pytest.param("mpirun", marks=[pytest.mark.mpi, pytest.mark.whole])]
)
def test_when_a_rank_is_killed_nothing_is_left_on_any_node_and_the_log_names_it(
    template, by_hand, cluster, words, tmp_path
):
    job, log = by_hand(
        template,
        *words("run", "budget.steps=100000"),
        options=["--no-requeue"],
    )
    out = tmp_path / "run"
    wait_for_step_3(cluster, job, out, log)
    assert len({p.node for p in training(cluster)}) == 2
    (doomed,) = [p for p in training(cluster) if is_rank(p.pid, template, 2)]
    os.kill(doomed.pid, signal.SIGKILL)
    assert cluster.wait(job) == "FAILED"
    until(lambda: not cluster.processes("hpclm"), "end of all processes", cluster)
    if template != "mpirun":  # which leaves the ranks less than a second
        [cause] = [line for line in lines(out / "log.txt") if " E " in line]
        assert f"rank 2 on {doomed.node} (pid " in cause and "left no message: killed" in cause


@pytest.mark.always
def test_when_a_node_loses_its_power_the_others_end_once_slurm_notices(by_hand, cluster, words, tmp_path):
    if not cluster.isolated:
        pytest.skip("nodes that share this machine's processes cannot lose power separately")
    job, log = by_hand("srun", *words("run", "budget.steps=100000"))
    out = tmp_path / "run"
    wait_for_step_3(cluster, job, out, log)
    _, second = sorted({p.node for p in training(cluster)})
    cluster.power_off(second)
    until(lambda: not training(cluster), "end of the other ranks", cluster)
    assert cluster.state(job) in ("NODE_FAIL", "PENDING", "COMPLETING", "REQUEUED"), log.read_text()


@pytest.mark.whole  # tests/distributed/test_watchdog.py stops ranks, and tests/test_preemption.py has jobs started again
def test_a_job_with_a_stopped_rank_is_requeued_and_the_rank_is_gone(cluster, words, tmp_path):
    watched = ["budget.steps=100000", "cluster.hang_minutes=0.2", "cluster.preflight=false"]
    asked = ["--nodes", 2, "--gpus", 1, "--time", 60]
    env = {**cluster.env, "OMP_NUM_THREADS": "1", "HPCLM_SITE": ""}
    done = cluster.run([sys.executable, "-m", "hpclm.submit", *asked, *words("run", *watched)], cwd=ROOT, env=env)
    job, out = done.stdout.split()[1].rstrip(":"), tmp_path / "run"
    wait_for_step_3(cluster, job, out, out / f"logs/job-{job}.log")
    ranks = [p for p in cluster.processes(command_of("hpclm.train")) if str(out) in p.words]
    (stopped,) = [p for p in ranks if is_rank(p.pid, "srun", 1)]
    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: cluster.show(job)["Restarts"] == "1", "restart", cluster)
    until(lambda: not Path(f"/proc/{stopped.pid}").exists(), "end of the stopped rank", cluster)
    told = [line for line in lines(out / "log.txt") if " E " in line]
    assert f"rank 1 on {stopped.node}" in told[0] and "it does not answer" in told[0]
    cluster.run(["scancel", job])
