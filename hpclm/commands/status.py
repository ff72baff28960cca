"""``hpclm status``: the state of runs, within a second and even if the scheduler does not answer."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hpclm import cli, files, terminal
from hpclm.node import processes, slurm
from hpclm.rundir import runs as folders
from hpclm.rundir.status import RunStatus, job_words, query, span
from hpclm.terminal import say

DEADLINE = 0.75  # seconds after the start of this process by which squeue must have answered
LEAST = 0.1  # seconds that it has in any case
LINES = 3  # of metrics.jsonl that the table needs
COLUMNS = ("RUN", "STATE", "STEP", "LOSS", "TOKENS/S", "LEFT", "LAST STEP", "CHECKPOINT", "")


def main(argv: list[str]) -> int:
    """``hpclm status``."""
    parser = terminal.ArgumentParser(
        prog="hpclm status",
        description="Show the state of runs: all below a folder, or some in detail. Reads the runs' own files, and asks Slurm's "
        "squeue, which may be slow or missing.",
    )
    parser.add_argument("run", nargs="*", help=f"{cli.SEVERAL} (default: all)")
    cli.add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list with an object for each run")
    args = parser.parse_args(argv)
    chosen = folders.choose(args.run, args.runs) or folders.find(args.runs)
    squeue = slurm.start_squeue({out.stat().st_uid for out in chosen}) if chosen else None
    if args.run:
        runs = [folders.read(out) for out in chosen]
    else:
        runs = [folders.read(out, LINES, brief=True) for out in chosen]
    began = processes.started(os.getpid())
    found = query(runs, max(LEAST, DEADLINE - (time.time() - began if began else 0)), squeue)
    if args.json:
        print(json.dumps([values(each) for each in found], indent=2))
    elif args.run:
        print("\n\n".join("\n".join(detail(each)) for each in found))
    elif found:
        print("\n".join(table(found)))
    else:
        say(f"{folders.none_in(args.runs)}; give another folder with --runs, or start a run with hpclm submit")
    return 0


def table(found: list[RunStatus]) -> Iterator[str]:
    """A header, and a line for each run."""
    yield from terminal.columns([COLUMNS, *map(row, found)])
    silent = {each.asked for each in found if each.asked}
    yield from (f"queue: unknown ({terminal.line(why)})" for why in sorted(silent))


def row(each: RunStatus) -> tuple[str, ...]:
    """One run's line of the table."""
    run = each.run
    notes = [each.where() if each.live else each.ending.splitlines()[0] if each.ending else "", *each.warnings()]
    cells = (
        files.shown(run.out),
        each.name,
        f"{run.step}/{each.total}" if each.total else str(run.step) if run.attempts else "-",
        loss(each) or "-",
        f"{each.tokens_per_second:,.0f}" if each.tokens_per_second else "-",
        span(each.left) if each.name == "running" and each.left is not None else "-",
        f"{span(each.age)} ago" if each.age is not None else "-",
        str(run.checkpoint[0]) if run.checkpoint else "-",
        " · ".join(note for note in notes if note),
    )
    return tuple(map(terminal.line, cells))


def detail(each: RunStatus) -> Iterator[str]:
    """Everything about one run, one line each."""
    lines = dict(_lines(each))
    for name, text in lines.items():
        if text:
            yield f"{name:<12}{terminal.plain(text) if name == 'ended' else terminal.line(text)}"
    yield from (f"{'warning':<12}{terminal.line(text)}" for text in each.warnings())
    out = terminal.line(files.typed(each.run.out))
    if each.live:
        yield f"{'next':<12}hpclm logs -f {out} · hpclm cancel {out}"
    elif each.name == "cancelled":
        yield f"{'next':<12}hpclm resume {out}"
    elif each.name in ("exited", "ended", "failed", "stopped"):
        yield f"{'next':<12}hpclm logs {out} · hpclm resume {out}"


def _lines(each: RunStatus) -> Iterator[tuple[str, str]]:
    run = each.run
    where = each.where()
    yield "run", files.shown(run.out)
    yield "state", f"{each.name}{f': {where}' if where else ''}"
    yield (
        "queue",
        f"unknown ({each.asked})" if each.asked else job_words(each.job) if each.job and not each.job.live else "",
    )
    of = f" of {each.total}, {run.step / each.total:.0%}" if each.total else ""
    left = f", {span(each.left)} left" if each.name == "running" and each.left is not None else ""
    yield "step", f"{run.step}{of}{left}" if run.attempts else ""
    held_out = [r for r in run.rows if isinstance(r.get("validation_loss"), (int, float))]
    validation = (
        f" (validation {held_out[-1]['validation_loss']:.4f} at step {held_out[-1]['step']})" if held_out else ""
    )
    yield "loss", f"{loss(each)}{validation}" if loss(each) else ""
    if each.tokens_per_second and each.step_seconds:
        yield "speed", f"{each.tokens_per_second:,.0f} tokens/s, {each.step_seconds:.3g} s a step"
    yield "last step", f"{span(each.age)} ago" if each.age is not None else ""
    if run.checkpoint:
        yield "checkpoint", f"step {run.checkpoint[0]}, {span(max(0, each.now - run.checkpoint[1]))} ago"
    if run.attempt:
        size, launcher = run.attempt.get("size"), run.attempt.get("launcher")
        ranks = f", {size} rank{'s' * (size != 1)} by {launcher}" if size and launcher else ""
        begun = f"the last from step {run.attempt.get('from_step')} on {run.attempt.get('host')}{ranks}, {run.attempt.get('time')}"
        begun += f", settings in {run.attempt['config']}" if run.attempt.get("config") else ""
        yield "attempts", f"{run.attempt_count}, {begun}"
    yield "rollback", f"the next attempt resumes from step {run.rollback}" if run.rollback is not None else ""
    yield "ended", "" if each.live else each.ending.replace("\n", "\n" + " " * 12)
    job_log = run.job_log()
    logs = [run.out / "log.txt", *([job_log] if job_log else [])]
    yield "logs", " · ".join(files.shown(path) for path in logs if files.is_file(path))


def loss(each: RunStatus) -> str:
    """The last step's loss."""
    steps = each.run.steps
    if not steps:
        return ""
    return "not finite" if steps[-1]["loss"] is None else f"{steps[-1]['loss']:.4f}"


def values(each: RunStatus) -> dict[str, Any]:
    """One run for programs: times in seconds, null if unknown."""
    run, steps = each.run, each.run.steps
    return {
        "run": str(run.out),
        "state": each.name,
        "queue": f"unknown: {each.asked}" if each.asked else None,
        "job": asdict(each.job) if each.job else None,
        "process": each.process,
        "step": run.step,
        "total_steps": each.total,
        "loss": steps[-1]["loss"] if steps else None,
        "tokens_per_second": each.tokens_per_second,
        "step_seconds": each.step_seconds,
        "seconds_left": each.left if each.name == "running" else None,
        "last_step_age": each.age,
        "checkpoint": run.checkpoint[0] if run.checkpoint else None,
        "attempts": run.attempt_count,
        "from_step": run.attempt.get("from_step"),
        "host": run.attempt.get("host"),
        "ending": each.ending or None,
        "slow": list(run.slow) if each.live else [],
        "warnings": each.warnings(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
