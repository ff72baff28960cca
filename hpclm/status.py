"""The verb ``hpclm status``: where runs are, within a second and whatever the scheduler does."""

import argparse
import json
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpclm import cli
from hpclm.cluster import process
from hpclm.job import runs as folders
from hpclm.job.standing import Standing, job_words, look, span

ANSWERS = 0.75  # seconds after this process began when squeue must have answered; the rest of a second is for the rest
LEAST = 0.1  # seconds it is given in any case
COLUMNS = ("RUN", "STATE", "STEP", "LOSS", "TOKENS/S", "LEFT", "LAST STEP", "CHECKPOINT", "")


def main(argv: list[str]) -> int:
    """``hpclm status``."""
    parser = argparse.ArgumentParser(
        prog="hpclm status",
        description="Show how runs stand: all below a folder, or some in detail. Reads the runs' own files, and asks Slurm's "
        "squeue, which may be slow or missing.",
    )
    parser.add_argument("run", nargs="*", help="run directories, or their names below --runs (default: all)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list with an object for each run")
    args = parser.parse_args(argv)
    chosen = [folders.resolve(word, args.runs) for word in args.run] or folders.find(args.runs)
    runs = [folders.read(out) for out in chosen]
    began = process.began(os.getpid())
    found = look(runs, max(LEAST, ANSWERS - (time.time() - began if began else 0)))
    if args.json:
        print(json.dumps([values(each) for each in found], indent=2))
    elif args.run:
        print("\n\n".join("\n".join(detail(each)) for each in found))
    elif found:
        print("\n".join(table(found)))
    else:
        print(f"no run in {args.runs}; name their folder with --runs, or start one with hpclm submit")
    return 0


def table(found: list[Standing]) -> Iterator[str]:
    """A line for each run under a line of titles."""
    rows = [COLUMNS] + [row(each) for each in found]
    widths = [max(len(line[column]) for line in rows) for column in range(len(COLUMNS))]
    for line in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
    silent = {each.asked for each in found if each.asked}
    yield from (f"queue: unknown ({why})" for why in sorted(silent))


def row(each: Standing) -> tuple[str, ...]:
    """One run's line of the table."""
    run = each.run
    notes = [each.where() if each.live else each.ending.splitlines()[0] if each.ending else "", *each.warnings()]
    return (
        str(run.out),
        each.name,
        f"{run.step}/{each.total}" if each.total else str(run.step) if run.attempts else "-",
        loss(each) or "-",
        f"{each.tokens_per_second:,.0f}" if each.tokens_per_second else "-",
        span(each.left) if each.name == "running" and each.left is not None else "-",
        f"{span(each.age)} ago" if each.age is not None else "-",
        str(run.checkpoint[0]) if run.checkpoint else "-",
        " · ".join(note for note in notes if note),
    )


def detail(each: Standing) -> Iterator[str]:
    """All that is known of one run, a line for each thing."""
    lines = dict(_lines(each))
    yield from (f"{name:<12}{text}" for name, text in lines.items() if text)
    yield from (f"{'warning':<12}{text}" for text in each.warnings())
    out = shlex.quote(str(each.run.out))
    if each.live:
        yield f"{'next':<12}hpclm logs -f {out} · hpclm cancel {out}"
    elif each.name in ("left", "ended", "failed", "stopped"):
        yield f"{'next':<12}hpclm logs {out} · hpclm resume {out}"


def _lines(each: Standing) -> Iterator[tuple[str, str]]:
    run = each.run
    where = each.where()
    yield "run", str(run.out)
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
        yield "attempts", f"{len(run.attempts)}, {begun}"
    yield "ended", "" if each.live else each.ending.replace("\n", "\n" + " " * 12)
    job_log = run.job_log()
    logs = [run.out / "log.txt", *([job_log] if job_log else [])]
    yield "logs", " · ".join(str(path) for path in logs if path.is_file())


def loss(each: Standing) -> str:
    """The last step's loss, in words."""
    steps = each.run.steps
    if not steps:
        return ""
    return "not finite" if steps[-1]["loss"] is None else f"{steps[-1]['loss']:.4f}"


def values(each: Standing) -> dict[str, Any]:
    """What is known of one run, for programs: times in seconds, null where something is not known."""
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
        "attempts": len(run.attempts),
        "from_step": run.attempt.get("from_step"),
        "host": run.attempt.get("host"),
        "ending": each.ending or None,
        "slow": list(run.slow) if each.live else [],
        "warnings": each.warnings(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
