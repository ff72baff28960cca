"""A run whose loss spikes: what it keeps, what it says, and how it goes back."""

import json

import pytest

from hpclm import cli
from hpclm.base.errors import DivergedError
from hpclm.checkpoint.directory import steps
from hpclm.config import from_cli
from hpclm.distributed.context import single
from hpclm.launch.jobs import state
from hpclm.launch.schedulers import current_job
from hpclm.rundir import runs
from hpclm.training import loop
from hpclm.training.start import RunStart
from hpclm.training.tensorboard import EventFile
from tests.forks import hpclm
from tests.runs import losses

OVERFLOW = """
import torch
from hpclm.model.gpt import Block

class Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")

class Overflowing(Block):
    def forward(self, x, layout):
        x = super().forward(x, layout)
        return Infinite.apply(x) if torch.is_grad_enabled() else x
"""


@pytest.fixture
def train(tiny):
    """Train in this process; the exit code."""

    def call(out, *words, resume_step=None):
        quiet = ["cluster.preflight=false", "optim.schedule=constant", "budget.steps=100"]
        job = current_job()
        return loop.run(RunStart(from_cli([*tiny(out, *quiet), *words]), resume_step, job), single(job=job))

    return call


def names(out):
    return [int(path.name[5:]) for path in steps(out / "checkpoints")]


@pytest.fixture
def spiked(train, tmp_path):
    """A run that was healthy up to step 20, and trained with a hundred times its rate from there to step 44."""
    assert train("run", "stop_at=20") == 0
    assert train("run", "stop_at=44", "optim.lr=3", "optim.clip=0") == 0
    return tmp_path / "run"


def test_a_spike_leaves_the_healthy_checkpoints_and_is_told(spiked, capsys):
    assert names(spiked) == [12, 16, 20, 40, 44]
    rows = [json.loads(line) for line in (spiked / "metrics.jsonl").read_text().splitlines()]
    first = next(row["step"] for row in rows if row["loss"] > 10)
    assert {row["step"]: row.get("spiking_since") for row in rows if row["step"] >= first - 1} == {
        first - 1: None,
        **dict.fromkeys(range(first, 45), first),
    }
    log = (spiked / "log.txt").read_text()
    assert f"loss spike since step {first}: " in log
    assert "step 24 is saved, and does not replace healthy checkpoints" in log
    standing = state(spiked, 1)
    assert [*standing.warnings()] == [f"loss spike since step {first}: hpclm checkpoints {spiked}"]
    assert cli.main(["checkpoints", str(spiked), "--no-verify"]) == 0
    *lines, hint = capsys.readouterr().out.splitlines()
    assert ["spike" in line for line in lines] == [False] * 3 + [True] * 2
    assert hint == f"to go back to the newest healthy one: hpclm resume {spiked} --from 20"
    cli.main(["checkpoints", str(spiked), "--no-verify", "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["healthy"] for row in found] == [True] * 3 + [False] * 2


def test_a_run_goes_back_and_learns_what_it_would_have_learned(spiked, train, tmp_path):
    words = ["stop_at=24", "optim.lr=3e-3", "optim.clip=1", "job.env.OMP_NUM_THREADS=1"]
    hpclm("resume", spiked, "--from", 16, "--cluster", "local", *words, check=0)
    train("undisturbed", "stop_at=24")
    assert losses(spiked) == losses(tmp_path / "undisturbed")  # each step once, all bits equal
    assert names(spiked) == names(tmp_path / "undisturbed") == [16, 20, 24]
    away = sorted(path.name for path in (spiked / "checkpoints").glob(".rolled-back-*"))
    assert away == [f".rolled-back-step-000000{step}" for step in (20, 40, 44)]
    kept = [json.loads(line)["step"] for line in (spiked / "metrics.rolled-back-1.jsonl").read_text().splitlines()]
    assert kept == list(range(17, 45))
    assert runs.read_run(spiked).attempt["from_step"] == runs.read_run(spiked).attempt["back_to"] == 16
    assert "step        24/100" in hpclm("status", spiked, check=0).stdout
    train("run", "stop_at=28")
    assert names(spiked) == [20, 24, 28]  # a later start resumes from the newest


def test_train_goes_back_once_in_a_job_that_is_started_again(spiked, train, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    train("run", "stop_at=24", resume_step=20)
    assert names(spiked) == [16, 20, 24] and runs.read_run(spiked).attempt["back_to"] == 20
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train("run", "stop_at=28", resume_step=20)
    assert names(spiked) == [20, 24, 28] and runs.read_run(spiked).attempt["from_step"] == 24
    train("run", "stop_at=32", resume_step=24)  # another step, which this job was not told before
    assert names(spiked)[-1] == 32 and runs.read_run(spiked).attempt["from_step"] == 24


def test_scalars_of_steps_that_were_left_behind_are_hidden_by_tensorboard(spiked, train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("run", "stop_at=24", "log.tensorboard=true", resume_step=20)
    train("run", "stop_at=22", "log.tensorboard=true", resume_step=20)
    board = EventAccumulator(str(spiked / "tensorboard"), purge_orphaned_data=True).Reload()
    assert [event.step for event in board.Scalars("lm-loss-training/lm loss")] == [*range(1, 23)]


def test_attempts_that_begin_in_one_second_stay_in_order_for_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start in (0, 5, 3):
        board = EventFile(tmp_path, start)
        board.add("loss", 1.0, start + 1)
        board.flush()
        board.close()
    shown = EventAccumulator(str(tmp_path), purge_orphaned_data=True).Reload()
    assert [event.step for event in shown.Scalars("loss")] == [1, 4]


def test_what_cannot_be_gone_back_to_is_refused_and_nothing_changes(spiked, capsys):
    before = {path: path.read_bytes() for path in spiked.rglob("*") if path.is_file()}
    for words, told in {
        ("--from", "17"): "has no complete checkpoint of step 17; it has steps 12, 16, 20, 40, 44",
        ("--from=16", "model.layers=3"): "model.layers was 2 and is now 3",
        ("--from", "16", "--gpus", "3"): "must be a multiple of",
    }.items():
        assert cli.main(["resume", str(spiked), "--cluster", "local", *words]) == 64
        assert told in capsys.readouterr().err
    for words in (["--from", "x"], ["--from", "16", "--debug"], ["--from", "16", "--sweep", "seed=1,2"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["resume", str(spiked), *words])
    assert {path: path.read_bytes() for path in spiked.rglob("*") if path.is_file()} == before


def test_a_run_that_has_skipped_its_last_steps_at_the_smallest_scale_does_not_end_with_0(train, tmp_path, monkeypatch):
    (tmp_path / "overflowing.py").write_text(OVERFLOW)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["engine.precision=fp16", "scaler.initial=4", "model.block=overflowing:Overflowing", "stop_at=30"]
    with pytest.raises(DivergedError, match=r"the run ends at step 30, and its last 27 steps were skipped") as caught:
        train("run", *words, "optim.nonfinite_limit=1000")
    assert caught.value.exit_code == 93 and names(tmp_path / "run") == []
    with pytest.raises(DivergedError, match="20 steps in a row were not finite"):
        train("other", *words)
