"""Sweeps on this machine: what each run gets of it, what is skipped, and what one failure or a signal leaves of the others."""

import os
import shlex
import signal

import pytest

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.launch import sweep
from hpclm.rundir import runs
from tests.events import began
from tests.forks import Hpclm, hpclm
from tests.runs import PATIENCE, until

TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
SRUN = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"},
    **{"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1"},
}  # fmt: skip
RANKS = {
    "torchrun": (TORCHRUN, "torchrun has started this process as rank 1 of 2"),
    "mpirun": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        "Open MPI has started this process as rank 0 of 1",
    ),
    "srun": (SRUN, "Slurm has started this process as rank 1 of 2"),
}


@pytest.mark.parametrize("env, answer", RANKS.values(), ids=RANKS)
def test_a_rank_starts_no_sweep(env, answer):
    with pytest.raises(ConfigError, match=answer):
        sweep.check_alone(env)


def test_runs_that_train_at_the_same_time_get_gpus_of_their_own_or_a_share_of_the_cores():
    assert sweep.shares(1, 2, 4, {}) == [{}]
    assert sweep.shares(2, 2, 4, {}) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    chosen = {"CUDA_VISIBLE_DEVICES": "GPU-a, 5,MIG-b"}
    assert [share["CUDA_VISIBLE_DEVICES"] for share in sweep.shares(3, 1, 3, chosen)] == ["GPU-a", "5", "MIG-b"]
    threads = [int(share["OMP_NUM_THREADS"]) for share in sweep.shares(3, 2, 0, {})]
    assert len(threads) == 3 and all(1 <= number <= max(1, (os.cpu_count() or 1) // 6) for number in threads)
    assert sweep.shares(2, 1, 0, {"OMP_NUM_THREADS": "7"}) == [{"OMP_NUM_THREADS": "7"}] * 2
    with pytest.raises(
        ConfigError, match=r"--parallel 3: 3 runs of 2 GPUs need 6, but this machine has 5; give --parallel 2"
    ):
        sweep.shares(3, 2, 5, {})
    with pytest.raises(ConfigError, match=r"2 runs of 8 GPUs need 16, but this machine has 4; give job.gpus=4"):
        sweep.shares(2, 8, 4, {})


MISTAKES = {
    "train --sweep model.attention.heads=4,5": (64, "model.attention.heads=5"),
    "train --sweep optim.lr=1e-3,fast": (64, "optim.lr='fast' must be a number"),
    "train --sweep job.gpus=1,2": (64, "job.gpus would have no effect"),
    "train --sweep data.source=synthetic,indexed": (64, "data.prefix is not set"),
    "train --sweep seed=1 --sweep seed=1": (64, "seed is given twice; put all its values together"),
    "train --parallel 2": (2, "--parallel is for --sweep"),
    "train --sweep seed=1,2 --parallel 0": (2, "'0' is not a whole number of at least 1"),
    "train --sweep seed=1,2 --from 4": (2, "--from is for a single run"),
    "submit --cluster local --sweep model.attention.heads=4,5": (64, "model.attention.heads=5"),
    "submit --cluster local --sweep data.source=synthetic,indexed": (64, "data.prefix is not set"),
    "submit --cluster local --sweep seed=1,2 --dry-run": (64, "job.cluster=local has none"),
    "submit --parallel 2": (64, "--parallel is for --sweep"),
    "submit --cluster slurm --sweep seed=1,2 --parallel 2": (64, "--parallel is for a sweep with --cluster local, not"),
    "submit --sweep seed=1,2 --debug": (64, "--debug is for one run, without --sweep"),
    "submit --cluster local --sweep seed=1,2 --parallel 2 job.env.CUDA_VISIBLE_DEVICES=0": (
        64,
        "gives all runs the same GPUs",
    ),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_in_any_run_ends_the_command_before_the_first_one_starts(words, tiny, tmp_path, capsys):
    code, answer = MISTAKES[words]
    verb, *options = shlex.split(words)
    try:
        ended = cli.main([verb, *tiny("run"), *options])
    except SystemExit as end:
        ended = end.code
    said = capsys.readouterr()
    assert ended == code and answer in said.err and said.out == "" and list(tmp_path.iterdir()) == [], said


def test_a_sweep_goes_on_after_a_failure_and_continues_after_a_signal(tiny, tmp_path):
    rates = "optim.lr=1e-3,1e38"
    words = ["train", *tiny("run", "budget.steps=3000", "optim.clip=0", "checkpoint.every=0"), "--sweep", rates]
    outs = [tmp_path / f"run-lr-{rate}" for rate in ("1e-3", "1e38")]
    with Hpclm(*words, cwd=tmp_path) as process:
        until(lambda: runs.is_run(outs[0]) and runs.read_run(outs[0]).step >= 5, "a run that trains")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 85
        shown, logged = process.communicate()
    assert "2 of 2 runs are not done; to continue, repeat the command: hpclm train" in shown and rates in shown
    assert "SIGINT: the running ones save and exit, and no other run starts" in logged
    assert [runs.is_run(out) for out in outs] == [True, False]
    saved = runs.read_run(outs[0]).checkpoint[0]
    short = [word.replace("budget.steps=3000", f"budget.steps={saved + 5}") for word in words]
    done = hpclm(*short, "--parallel", "2", cwd=tmp_path, check=93)
    assert "run-lr-1e38: failed with exit code 93: step 21: loss nan" in done.stderr
    assert [runs.read_run(out).end["state"] for out in outs] == ["done", "failed"]
    assert began(outs[0])[-1]["from_step"] == saved
    lines = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("run-lr")]
    assert lines == [["run-lr-1e-3", "done"], ["run-lr-1e38", "diverged"]]
    report = tmp_path / "run-lr-report.html"
    assert f"report  {report.name}" in done.stdout and "2 runs compared" in report.read_text()
    times = [(out / "events.jsonl").stat().st_mtime for out in outs]
    again = hpclm(*short, cwd=tmp_path, check=93)
    assert again.stderr.count("; skipped") == 1 and "not started again with the same settings" in again.stderr
    assert times == [(out / "events.jsonl").stat().st_mtime for out in outs]


@pytest.mark.whole
def test_a_sweep_starts_several_ranks_for_each_run_and_ends_with_its_command(tiny, tmp_path):
    words = ["submit", "--cluster", "local", "--gpus", "2", *tiny("run", "budget.steps=100000"), "--sweep", "seed=1,2"]
    outs = [tmp_path / f"run-seed-{seed}" for seed in (1, 2)]
    with Hpclm(*words, "--parallel", "2", cwd=tmp_path) as process:
        until(lambda: all(runs.is_run(out) and runs.read_run(out).step >= 3 for out in outs), "two runs that train")
        process.kill()
        process.wait()
    until(lambda: all(runs.read_run(out).summary["state"] == "exited" for out in outs), "two runs that have saved")
    assert all(runs.read_run(out).attempt["size"] == 2 and runs.read_run(out).checkpoint for out in outs)
    steps = max(runs.read_run(out).checkpoint[0] for out in outs) + 3
    short = [word.replace("budget.steps=100000", f"budget.steps={steps}") for word in words]
    done = hpclm(*short, cwd=tmp_path, check=0)
    assert [config.load(out / "config.yaml").seed for out in outs] == [1, 2]
    assert [runs.read_run(out).summary["state"] for out in outs] == ["done", "done"]
    assert "report  run-seed-report.html" in done.stdout
