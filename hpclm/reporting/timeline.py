"""The attempts of a run on a page: a summary, a bar for each, and a table of numbers."""

import time
from collections.abc import Collection

from hpclm.base.terminal import many
from hpclm.reporting.attempts import KINDS, AttemptReport
from hpclm.reporting.history import History
from hpclm.reporting.html import table, text
from hpclm.reporting.provenance import some
from hpclm.rundir.state import moment, span

COLOURS = dict(zip(KINDS, ("#b8bec6", "#8e6bbf", "#2a9d5c", "#d64545"), strict=True))
UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
HEADS = ("attempt", "steps", "redone", "began", "where", "queued", "starting", "training")
CAPTION = "A bar for each attempt, from when it was queued to its last sign of life. In a gap, none was running or known to be queued."
LOST = " Lost: steps after the last checkpoint, which the next attempt redid."


def state(history: History) -> str:
    """The progress of a run, in one line."""
    if not history.attempts:
        return "The run has not started yet."
    last = history.attempts[-1]
    planned = f" of {last.row['steps']:,}" if last.row.get("steps") else ""
    ended = last.ended or f"not ended, according to its files; the last sign of life was at {_moment(last.end)}"
    return f"{last.last:,}{planned} steps in {span(history.wall)}: {ended}."


def summary(history: History) -> str:
    """A summary of a run's attempts, for a reader who does not know the run."""
    if not history.attempts:
        return ""
    said = [f"The run had {many(len(history.attempts), 'attempt')}."]
    interrupted = sum(attempt.interrupted for attempt in history.attempts[:-1])
    if interrupted:
        lost = sum(attempt.lost for attempt in history.attempts)
        times = {1: "once", 2: "twice"}.get(interrupted, f"{interrupted} times")
        redone = f"{many(lost, 'step')} ({span(history.seconds('lost'))}) had" if lost else "no step had"
        said.append(f"It was interrupted {times} and resumed from its last checkpoint; {redone} to be redone.")
    if history.goodput is not None:
        said.append(f"{history.goodput:.0%} of the time went into training steps that count (goodput).")
    return " ".join(said)


def label(attempt: AttemptReport) -> str:
    """The steps of an attempt, and how it ended."""
    return f"steps {attempt.first} to {attempt.last}: {attempt.ended or 'still running, or no message yet'}"


def kinds(histories: Collection[History]) -> dict[str, str]:
    """The kinds of phases that take a visible part of the time, with their colours."""
    used = {kind for history in histories for kind in KINDS if history.seconds(kind) > history.wall / 1000}
    return {kind: colour for kind, colour in COLOURS.items() if kind in used}


def unit(seconds: float) -> tuple[str, int]:
    """The unit of an axis of this length, and the seconds in it: the largest unit that fits more than three times."""
    fitting = (entry for entry in UNITS.items() if seconds > 3 * entry[1])
    return next(fitting, ("seconds", 1))


def bars(history: History) -> str:
    """A bar for each attempt, below its label."""
    wall = max(history.wall, 1e-9)
    parts = []
    for attempt in history.attempts:
        pieces = []
        for phase in attempt.phases:
            left = 100 * (phase.begin - history.attempts[0].begin) / wall
            style = f"left:{left:.2f}%;width:{100 * phase.seconds / wall:.2f}%;background:{COLOURS[phase.kind]}"
            pieces.append(f'<i class="{phase.kind}" style="{style}" title="{phase.kind} {span(phase.seconds)}"></i>')
        parts.append(
            f'<div class="attempt"><p><b>{attempt.number}</b> {text(label(attempt))}</p>'
            f'<div class="bar">{"".join(pieces)}</div></div>'
        )
    ends = f'<p class="ends soft"><span>0</span><span>{span(history.wall)} since the run was first queued or started</span></p>'
    if not parts:
        return "<p>None.</p>"
    return "".join([*parts, ends])


def legend(histories: Collection[History]) -> str:
    """The colours of the phases, and the meaning of the bars."""
    used = kinds(histories)
    swatches = (
        f'<span><i class="{kind}" style="background:{colour}"></i>{kind}</span>' for kind, colour in used.items()
    )
    caption = CAPTION
    if "lost" in used:
        caption += LOST
    return f'<div class="legend">{"".join(swatches)}</div><p class="soft">{caption}</p>'


def numbers(history: History) -> str:
    """A table of the attempts."""
    return table(HEADS, [_row(attempt) for attempt in history.attempts])


def seconds(value: float) -> str:
    """A time of at least a second; empty for shorter times."""
    return span(value) if value >= 1 else ""


def _row(attempt: AttemptReport) -> list[str]:
    row = attempt.row
    job = f"job {row['job_id']}, " if row.get("job_id") else ""
    hosts = row.get("hosts") or [row.get("host", "")]
    return [
        str(attempt.number),
        f"{attempt.first} → {attempt.last}",
        str(attempt.lost) if attempt.lost else "",
        _moment(moment(row["time"]) or 0.0),
        job + some(hosts, 3),
        *(seconds(attempt.seconds(kind)) for kind in ("queued", "starting", "training")),
    ]


def _moment(stamp: float) -> str:
    """A time since 1970 in this machine's time zone, which the footer names."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))
