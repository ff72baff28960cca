"""Run directories as runs leave them, written by hand: what happened in them is known."""

import json
from datetime import UTC, datetime, timedelta

from hpclm.config import DataConfig, RunConfig, dump
from hpclm.config.optim import OptimConfig
from hpclm.config.schema import BudgetConfig
from tests.events import note, submit

NOON = datetime(2026, 3, 5, 12, tzinfo=UTC).astimezone()


def at(seconds):
    return NOON + timedelta(seconds=seconds)


def stamp(seconds):
    return at(seconds).strftime("%Y-%m-%dT%H:%M:%S%z")


def row(step, seconds, loss=None, **more):
    figures = dict(grad_norm=1.5, lr=1e-3, step_seconds=1.0, tokens_per_second=2000.0 + step, memory=3 << 30, mfu=0.4)
    figures |= dict(data_fraction=0.01, data_seconds=0.01)
    found = {"step": step, "samples": 8 * step, "time": at(seconds).timestamp(), "loss": loss or 4 - step / 50}
    return found | figures | more


def lines(rows):
    return "".join(json.dumps(each) + "\n" for each in rows)


def preempted(out, lr=1e-3):
    """A run of 100 steps, a second each, saved every 20, in four attempts of Slurm's job 7:

    queued for 60 s, started in 10 s; told by SIGUSR1 at step 30 and saved; queued for 100 s; killed with its node after step
    57, when 40 was saved; queued for 50 s; out of memory at step 70, when 60 was saved; resumed by hand as job 8; done.
    """
    out.mkdir(mode=0o700)
    config = RunConfig(
        name=out.name,
        out=str(out),
        data=DataConfig(source="synthetic"),
        budget=BudgetConfig(steps=100),
        optim=OptimConfig(lr=lr),
    )
    dump(config, out / "config.yaml")
    begins = [60, 200, 300, 420]
    starts, jobs = [0, 30, 40, 60], ["7", "7", "7", "8"]
    again = "start {} of job 7; why the last one ended: {}"
    after = [
        {},
        {"after": again.format(2, "SIGUSR1: saved at step 30, exiting; a1 is DOWN")},
        {"after": again.format(3, "node a2 failed (NODE_FAIL)")},
        {"after": "rank 3 on a1: CUDA out of memory. Tried to allocate 2 GiB"},
    ]
    size = dict(steps=100, launcher="slurm", size=8, hosts=["a1", "a2"], host="a1")
    attempts = [
        dict(time=stamp(begin + 8), began=at(begin).timestamp(), from_step=first, job_id=job) | size | why
        for begin, first, job, why in zip(begins, starts, jobs, after)
    ]
    submit(out, "slurm", "7", nodes=2, tasks_per_node=4, time=stamp(0))
    note(out, "began", **attempts[0])
    saved = "SIGUSR1: saved at step 30, exiting"
    note(out, "ended", time=stamp(102), state="exited", code=85, step=30, ending=saved)
    note(out, "began", **attempts[1])
    note(out, "began", **attempts[2])
    submit(out, "slurm", "8", nodes=2, tasks_per_node=4, time=stamp(400))
    note(out, "began", **attempts[3])
    note(out, "ended", time=stamp(471), state="done", code=0, step=100)
    kept = [row(step, 70 + step) for step in range(1, 31)]
    kept += [row(step, 210 + step - 30) for step in range(31, 41)]
    kept += [row(step, 310 + step - 40) for step in range(41, 61)]
    kept += [row(step, 430 + step - 60) for step in range(61, 101)]
    kept.insert(50, dict(step=50, samples=400, time=at(321).timestamp(), part="valid", validation_loss=3.25))
    lost = [row(step, 210 + step - 30) for step in range(41, 58)] + [
        row(step, 310 + step - 40) for step in range(61, 71)
    ]
    (out / "metrics.jsonl").write_text(lines(kept))
    (out / "metrics.lost.jsonl").write_text(lines([*lost, lost[-1]]) + '{"step": 7')
    return out


def trained(out, losses, held_out=None, lr=1e-3):
    """A run of one attempt with these losses; ``held_out``: validation loss by step. None: it was not finite."""
    out.mkdir(mode=0o700, parents=True)
    steps = len(losses)
    config = RunConfig(
        out=str(out),
        data=DataConfig(source="synthetic"),
        budget=BudgetConfig(steps=steps),
        optim=OptimConfig(lr=lr),
    )
    dump(config, out / "config.yaml")
    start = dict(time=stamp(1), began=at(0).timestamp(), from_step=0, steps=steps, size=1, hosts=["a1"], host="a1")
    note(out, "began", **start)
    measured = [row(step, step) | {"loss": loss} for step, loss in enumerate(losses, 1)]
    measured += [
        dict(step=step, time=at(step).timestamp(), part="valid", validation_loss=loss)
        for step, loss in (held_out or {}).items()
    ]
    (out / "metrics.jsonl").write_text(lines(measured))
    return out
