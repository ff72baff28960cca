"""``hpclm status``: the state of runs, within a second and even if the scheduler does not answer."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hpclm import files, terminal
from hpclm.errors import ConfigError, DivergedError
from hpclm.node import processes
from hpclm.parser import SEVERAL, Parser
from hpclm.rundir import runs as folders
from hpclm.rundir import submissions
from hpclm.rundir.status import RunStatus, query, span
from hpclm.terminal import say

DEADLINE = 0.75  # seconds after the start of this process by which squeue must have answered
LEAST = 0.3  # seconds that it has in any case
COLUMNS = ("RUN", "STATE", "STEP", "LOSS", "TOKENS/S", "LEFT", "LAST STEP", "CHECKPOINT", "")

CURVE, NOTES = "LOSS CURVE", ""
WORTH = ("RUN", "STATE", "STEP", "LOSS", CURVE, "LEFT", "TOKENS/S", NOTES, "LAST STEP", "CHECKPOINT")
"""Columns, the most important first."""
NARROWEST = {CURVE: len(CURVE), NOTES: 24}
"""How narrow a column may become: a curve by fewer points, notes by an ellipsis."""
GAP = 2


def main(argv: list[str]) -> int:
    """``hpclm status``."""
    args = parser().parse_args(argv)
    if not args.run:
        folders.check_folder(args.runs)
    runs = [folders.read(out) for out in folders.choose(args.run, args.runs) or folders.find(args.runs)]
    began = processes.started(os.getpid())
    statuses = query(runs, max(LEAST, DEADLINE - (time.time() - began if began else 0)))
    if args.json:
        print(json.dumps([values(status) for status in statuses], indent=2))
    elif args.run:
        print("\n\n".join("\n".join(detail(status)) for status in statuses))
    elif statuses:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(table(statuses, width)))
    else:
        say(f"no run in {args.runs}; give another folder with --runs, or start a run with hpclm submit")
    return 0


def parser() -> Parser:
    """The parser of ``hpclm status``."""
    options = Parser(
        prog="hpclm status",
        description="Show the state of runs: all below a folder, or some in detail. Reads the runs' own files, and asks Slurm's "
        "squeue, which may be slow or missing.",
    )
    several = f"{SEVERAL} (default: all)"
    options.add_run(several, nargs="*")
    options.add_runs_folder()
    options.add_argument("--json", action="store_true", help="print a JSON list with an object for each run")
    return options


def table(statuses: Sequence[RunStatus], width: int | None = None) -> Iterator[str]:
    """A header, and a line for each run. ``width``: columns of the terminal; where the lines are longer, notes go below them."""
    rows = [COLUMNS, *map(row, statuses)]
    lines = terminal.columns(rows)
    if width is None:
        yield from lines
    else:
        yield from _fitted(rows, lines, width)
    silent = {status.asked for status in statuses if status.asked}
    yield from (f"queue: unknown ({terminal.line(why)})" for why in sorted(silent))


def _fitted(rows: Sequence[Sequence[str]], lines: Sequence[str], width: int) -> Iterator[str]:
    """``lines`` of ``rows``; those that are too long, with their notes on lines of their own."""
    import wcwidth

    bare = [cells[:-1] for cells in rows]
    blocks = fitted(bare[0], bare[1:], width)
    aligned = blocks == [[line] for line in terminal.columns(bare)]
    for line, block, (*_, note) in zip(lines, blocks, rows, strict=True):
        if aligned and terminal.width(line) <= width:
            yield line
        else:
            yield from block
            yield from (f"    {part}" for part in wcwidth.wrap(note, width - 4, break_on_hyphens=False))


def row(status: RunStatus) -> tuple[str, ...]:
    """One run's line of the table."""
    run, speed = status.run, status.run.summary.get("tokens_per_second")
    notes = [status.where() if status.live else status.ending, *status.warnings()]
    cells = (
        files.shown(run.out),
        status.name,
        f"{run.step}/{run.total}" if run.total else str(run.step) if run.attempt else "-",
        loss(status) or "-",
        f"{speed:,.0f}" if speed else "-",
        "-" if status.left is None else span(status.left),
        "-" if status.age is None else f"{span(status.age)} ago",
        str(run.checkpoint[0]) if run.checkpoint else "-",
        " · ".join(note for note in notes if note),
    )
    return tuple(map(terminal.line, cells))


def detail(status: RunStatus) -> Iterator[str]:
    """Everything about one run, one line each: the columns of the table, and what has no room there."""
    cells = dict(zip(COLUMNS[:-1], row(status)[:-1], strict=True))
    lines = [(name.lower(), cell) for name, cell in cells.items() if cell != "-"]
    for name, text in (*lines, *_more(status)):
        if text:
            yield f"{name:<12}{terminal.line(text)}"
    out = terminal.line(files.typed(status.run.out))
    if status.live:
        yield f"{'next':<12}hpclm logs -f {out} · hpclm cancel {out}"
    elif status.name == "cancelled":
        yield f"{'next':<12}hpclm resume {out}"
    elif status.name in ("exited", "ended", "failed", "stopped"):
        change = " key=value" if status.run.summary.get("code") == DivergedError.exit_code else ""
        yield f"{'next':<12}hpclm logs {out} · hpclm resume {out}{change}"


def _more(status: RunStatus) -> Iterator[tuple[str, str]]:
    run, summary, attempt = status.run, status.run.summary, status.run.attempt
    yield "job", status.where()
    yield "queue", f"unknown ({status.asked})" if status.asked else ""
    yield "ended", "" if status.live else status.ending
    if summary.get("validation_loss") is not None:
        yield "validation", f"{summary['validation_loss']:.4f} at step {summary.get('validation_step')}"
    if attempt:
        size, launcher = attempt.get("size"), attempt.get("launcher")
        by = f" by {launcher}" if launcher not in ("single", "local") else ", launched locally"
        ranks = f", {size} rank{'s' * (size != 1)}{by}" if size and launcher else ""
        begun = f"from step {attempt.get('from_step')} on {attempt.get('host')}{ranks}, {attempt.get('time')}"
        used = f", settings in {attempt['config']}" if attempt.get("config") else ""
        yield "attempts", f"{summary.get('attempts', 'several')}, the last {begun}{used}"
    with suppress(OSError, ConfigError):
        rollback = submissions.rollback(run.out)
        yield "rollback", "" if rollback is None else f"the next attempt resumes from step {rollback}"
    logs = [path for path in (run.out / "log.txt", run.job_log()) if path and files.is_file(path)]
    yield "logs", " · ".join(map(files.shown, logs))
    yield from (("warning", text) for text in status.warnings())


def loss(status: RunStatus) -> str:
    """The last step's loss."""
    value = status.run.summary.get("loss", "")
    return "not finite" if value is None else f"{value:.4f}" if value != "" else ""


def values(status: RunStatus) -> dict[str, Any]:
    """One run for programs: times in seconds, null if unknown."""
    run, summary = status.run, status.run.summary
    return {
        "run": str(run.out),
        "state": status.name,
        "queue": f"unknown: {status.asked}" if status.asked else None,
        "job": asdict(status.job) if status.job else None,
        "process": status.process,
        "step": run.step,
        "total_steps": run.total,
        **{name: summary.get(name) for name in ("loss", "tokens_per_second", "step_seconds")},
        "seconds_left": status.left,
        "last_step_age": status.age,
        "checkpoint": run.checkpoint[0] if run.checkpoint else None,
        "attempts": summary.get("attempts"),
        "from_step": run.attempt.get("from_step"),
        "host": run.attempt.get("host"),
        "ending": status.ending or None,
        "exit_code": summary.get("code"),
        "slow": run.slow if status.live else [],
        "warnings": list(status.warnings()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def fitted(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The lines of the header, then of each row, ``width`` columns wide. A name that takes more than half of that is on a line of
    its own."""
    above = [[row[0]] if terminal.width(row[0]) > width // 2 else [] for row in rows]
    rest = [("", *row[1:]) if name else row for name, row in zip(above, rows, strict=True)]
    header, *lines = _lines([heads, *rest], width)
    return [[header], *([*name, line] for name, line in zip(above, lines, strict=True))]


def _lines(table: Sequence[Sequence[str]], width: int) -> list[str]:
    widths = _widths(table, width)
    shown = [(number, name) for number, name in enumerate(table[0]) if name in widths]
    return terminal.columns([[_cut(name, row[number], widths[name]) for number, name in shown] for row in table])


def _widths(table: Sequence[Sequence[str]], width: int) -> dict[str, int]:
    """The columns that there is room for, and how wide each is."""
    whole = {column[0]: max(map(terminal.width, column)) for column in zip(*table, strict=True)}
    widths, room = {}, width + GAP
    for name in WORTH:
        least = min(whole.get(name, 0), NARROWEST.get(name, width))
        if least and least + GAP <= room:
            widths[name] = least
            room -= least + GAP
    for name, most in ((NOTES, room // 2), (CURVE, room), (NOTES, room)):
        if name in widths:
            more = min(whole[name] - widths[name], most, room)
            widths[name] += more
            room -= more
    return widths


def _cut(name: str, cell: str, width: int) -> str:
    if name == CURVE and len(cell) > width:
        return "".join(cell[number * (len(cell) - 1) // (width - 1)] for number in range(width))
    return terminal.shortened(cell, width)
