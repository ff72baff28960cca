"""A table of runs and the details of one run, for ``hpclm status``; and a live table for ``hpclm top``."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from hpclm.base import files, terminal
from hpclm.base.errors import ExitCode
from hpclm.rundir import branches, events, rows
from hpclm.rundir import runs as folders
from hpclm.rundir.runs import RunFacts
from hpclm.rundir.state import State, span

COLUMNS = ("RUN", "STATE", "STEP", "LOSS", "TOKENS/S", "LEFT", "LAST STEP", "CHECKPOINT", "")

CURVE = "LOSS CURVE"
NOTES = ""
WORTH = ("RUN", "STATE", "STEP", "LOSS", CURVE, "LEFT", "TOKENS/S", NOTES, "LAST STEP", "CHECKPOINT")
"""Columns, the most important first."""
NARROWEST = {CURVE: len(CURVE), NOTES: 24}
"""The least width of a column. A narrow curve has fewer points; narrow notes end with an ellipsis."""
GAP = 2
LIVE_COLUMNS = (*COLUMNS[:4], CURVE, *COLUMNS[4:])
PRINTED = 5  # number of lines at the end of a failed run's log that are shown
ORDER = ("running", "starting", "completing", "waiting", "failed", "ended", "unknown")
"""The states worth looking at first."""


def table(statuses: Sequence[State], width: int | None = None) -> Iterator[str]:
    """A header, and a line for each run. ``width``: columns of the terminal; the notes of a longer line go below it."""
    rows = [COLUMNS, *_tree(statuses)]
    lines = terminal.columns(rows)
    if width is None:
        yield from lines
    else:
        yield from _fitted(rows, lines, width)
    yield from silent(statuses)


def _tree(statuses: Sequence[State]) -> Iterator[tuple[str, ...]]:
    """The lines of runs, each branch indented below its trunk."""
    shown = {branches.resolved(status.run.out): files.shown(status.run.out) for status in statuses}
    for place, depth in branches.tree([(status.run.out, status.run.trunk) for status in statuses]):
        run, *cells, notes = row(statuses[place])
        trunk = statuses[place].run.trunk
        if trunk:
            notes = " · ".join(filter(None, [terminal.line(f"branch of {trunk.described(shown)}"), notes]))
        yield ("  " * depth + run, *cells, notes)


def silent(statuses: Sequence[State]) -> list[str]:
    """Lines with the reasons why schedulers did not answer."""
    return [f"queue: unknown ({terminal.line(why)})" for why in sorted({status.asked for status in statuses} - {""})]


def _fitted(rows: Sequence[Sequence[str]], lines: Sequence[str], width: int) -> Iterator[str]:
    """``lines`` of ``rows``; if one is too long, its notes follow on separate lines."""
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


def row(status: State) -> tuple[str, ...]:
    """One run's line of the table."""
    run = status.run
    speed = run.summary.get("tokens_per_second")
    steps = str(run.step) if run.attempt else "-"
    notes = [status.where() if status.live else status.ending, *status.warnings()]
    cells = (
        files.shown(run.out),
        status.name,
        f"{run.step}/{run.total}" if run.total else steps,
        loss(status) or "-",
        f"{speed:,.0f}" if speed else "-",
        "-" if status.left is None else span(status.left),
        "-" if status.age is None else f"{span(status.age)} ago",
        str(run.checkpoint[0]) if run.checkpoint else "-",
        " · ".join(note for note in notes if note),
    )
    return tuple(map(terminal.line, cells))


def detail(status: State) -> Iterator[str]:
    """All facts about one run, a line for each: the columns of the table and more."""
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
        then = f"hpclm resume {out}"
        if status.finished:
            then += " stop_at=null"
        if status.diverged:
            then = "the log ends with what to change"
        yield f"{'next':<12}hpclm logs {out} · {then}"
    elif status.name == "done":
        yield f"{'next':<12}hpclm report {out}"


def _more(status: State) -> Iterator[tuple[str, str]]:
    run = status.run
    summary = run.summary
    yield "job", status.where()
    yield "queue", f"unknown ({status.asked})" if status.asked else ""
    yield "ended", "" if status.live else status.ending
    if summary.get("validation_loss") is not None:
        yield "validation", f"{summary['validation_loss']:.4f} at step {summary.get('validation_step')}"
    if run.trunk:
        yield "branch of", run.trunk.described()
    if run.attempt:
        yield "attempts", _attempts(run)
    rollback = events.pending_rollback(run.events)
    yield "rollback", "" if rollback is None else f"the next attempt resumes from step {rollback}"
    if status.name in ("failed", "ended"):
        printed = rows.tail(run.job_log() or run.out / "log.txt").splitlines()[-PRINTED:]
        yield from zip(["printed", *("" for _ in printed)], printed, strict=False)
    logs = [path for path in (run.out / "log.txt", run.job_log()) if path and files.is_file(path)]
    yield "logs", " · ".join(map(files.shown, logs))
    yield from (("warning", text) for text in status.warnings())


def _attempts(run: RunFacts) -> str:
    attempt = run.attempt
    text = str(len(run.attempts))
    phases = sum(each.ended.get("state") == events.PHASE for each in run.attempts)
    interrupted = sum(each.ended.get("code") == ExitCode.REQUEUE for each in run.attempts) - phases
    ends = {"at a phase": phases, "by a signal": interrupted}
    counts = [f"{count} ended {how}" for how, count in ends.items() if count]
    if counts:
        text += f" ({', '.join(counts)})"
    text += f", the last from step {attempt.get('from_step')} on {attempt.get('host')}"
    launcher = attempt.get("launcher")
    if attempt.get("size") and launcher:
        by = ", launched locally" if launcher in ("single", "local") else f" by {launcher}"
        text += f", {terminal.many(attempt['size'], 'rank')}{by}"
    text += f", {attempt.get('time')}"
    if attempt.get("config"):
        text += f", settings in {attempt['config']}"
    return text


def loss(status: State) -> str:
    """The last step's loss; empty if unknown."""
    if "loss" not in status.run.summary:
        return ""
    value = status.run.summary["loss"]
    return "not finite" if value is None else f"{value:.4f}"


def values(status: State) -> dict[str, Any]:
    """The facts about one run for programs: times in seconds, None for unknown values."""
    run = status.run
    return {
        "run": str(run.out),
        "state": status.name,
        "queue": f"unknown: {status.asked}" if status.asked else None,
        "job": asdict(status.job) if status.job else None,
        "process": status.process,
        "step": run.step,
        "total_steps": run.total,
        **{name: run.summary.get(name) for name in ("loss", "tokens_per_second", "step_seconds")},
        "seconds_left": status.left,
        "last_step_age": status.age,
        "checkpoint": run.checkpoint[0] if run.checkpoint else None,
        "trunk": {"run": str(run.trunk.out), "step": run.trunk.step} if run.trunk else None,
        "attempts": len(run.attempts),
        "from_step": run.attempt.get("from_step"),
        "host": run.attempt.get("host"),
        "ending": status.ending or None,
        "exit_code": run.end.get("code"),
        "slow": run.slow if status.live else [],
        "warnings": list(status.warnings()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def fitted(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The lines of the header, then of each row, ``width`` columns wide. A name longer than half the width has its own line."""
    above = [[row[0]] if terminal.width(row[0]) > width // 2 else [] for row in rows]
    rest = [("", *row[1:]) if name else row for name, row in zip(above, rows, strict=True)]
    header, *lines = _lines([heads, *rest], width)
    return [[header], *([*name, line] for name, line in zip(above, lines, strict=True))]


def _lines(table: Sequence[Sequence[str]], width: int) -> list[str]:
    widths = _widths(table, width)
    shown = [(number, name) for number, name in enumerate(table[0]) if name in widths]
    return terminal.columns([[_cut(name, row[number], widths[name]) for number, name in shown] for row in table])


def _widths(table: Sequence[Sequence[str]], width: int) -> dict[str, int]:
    whole = {column[0]: max(map(terminal.width, column)) for column in zip(*table, strict=True)}
    widths: dict[str, int] = {}
    room = width + GAP
    for name in WORTH:
        narrowest = min(whole.get(name, 0), NARROWEST.get(name, width))
        if narrowest and narrowest + GAP <= room:
            widths[name] = narrowest
            room -= narrowest + GAP
    for name, widest in ((NOTES, room // 2), (CURVE, room), (NOTES, room)):
        if name in widths:
            more = min(whole[name] - widths[name], widest, room)
            widths[name] += more
            room -= more
    return widths


def _cut(name: str, cell: str, width: int) -> str:
    if name == CURVE and len(cell) > width:
        return "".join(cell[number * (len(cell) - 1) // (width - 1)] for number in range(width))
    return terminal.shortened(cell, width)


class TopScreen:
    """A live table of the runs below a folder."""

    def __init__(self, folder: Path, states: Callable[[Sequence[RunFacts]], list[State]]):
        self.folder = folder
        self._states = states

    def look(self) -> list[State]:
        """The current states of the runs, the most interesting first."""
        statuses = self._states([folders.read_run(out) for out in folders.find(self.folder)])
        order = {name: number for number, name in enumerate(ORDER)}
        stepped = {status.run.out: status.run.summary.get("stepped") or 0.0 for status in statuses}
        return sorted(statuses, key=lambda status: (order.get(status.name, len(ORDER)), -stepped[status.run.out]))

    def lines(self, statuses: list[State], width: int | None = None) -> list[str]:
        """The table, ``width`` columns wide; None: as wide as it is."""
        rows = [*map(live_row, statuses)]
        blocks = [terminal.columns([LIVE_COLUMNS, *rows])] if width is None else fitted(LIVE_COLUMNS, rows, width)
        return [*chain.from_iterable(blocks), *silent(statuses)]

    def screen(self, width: int, height: int) -> list[str]:
        """A title and the part of the table that fits the screen."""
        statuses = self.look()
        counts = Counter(status.name for status in statuses)
        states = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no runs"
        title = terminal.line(f"{self.folder}  {time.strftime('%H:%M:%S')}  {states}  (q exits)")
        header, *blocks = fitted(LIVE_COLUMNS, [*map(live_row, statuses)], width)
        lines = [title, *(silent(statuses)[:1] or [""]), *header]
        for number, block in enumerate(blocks):
            left = len(blocks) - number
            if len(lines) + len(block) + (left > 1) > height:
                lines.append(f"and {left} more")
                break
            lines += block
        return [terminal.shortened(line, width) for line in lines[:height]]


def live_row(status: State) -> tuple[str, ...]:
    """One run's line of ``TopScreen``: the line of the table, with a loss curve."""
    cells = row(status)
    return (*cells[:4], terminal.sparkline(status.run.summary.get("curve", [])) or "-", *cells[4:])
