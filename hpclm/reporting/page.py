"""A report as one HTML page that needs nothing else: it opens offline, on a phone and in print, in light and dark."""

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from hpclm import terminal
from hpclm.reporting.history import Attempt, History
from hpclm.rundir.status import moment, span

STYLE = """
:root { color-scheme: light dark; --soft: #808890; --ground: #fff; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; } }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--ground); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; break-after: avoid; } h1, td { overflow-wrap: anywhere; }
.cards, .figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .8rem; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
.cards b { display: block; font-size: 1.15rem; } .cards span, figcaption, footer { color: var(--soft); font-size: .85rem; }
figure { margin: 0; break-inside: avoid; } figure.wide { grid-column: 1 / -1; max-width: 60rem; } img { width: 100%; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--soft); vertical-align: top; }
td { min-width: 4rem; } tr { break-inside: avoid; }
@media print { :root { color-scheme: light; --ground: #fff; } html { font-size: 10px; } .figures { grid-template-columns: 1fr 1fr; } }
"""
CAPTIONS = {
    "loss": "Loss per step, and on held-out data where it was measured.",
    "attempts": "Every attempt of the run from when it was queued to its last sign of life. Lost: steps that the next attempt "
    "did again, because they came after the last checkpoint. Where there is no bar, no attempt was running, or known to be queued.",
}
PLAIN = ("out", "name", "job", "cluster")
"""Settings that say where a run is and not what it is."""
HEADS = ("attempt", "steps", "ended", "done again", "began", "where", "queued", "starting", "training")


def page(
    title: str, runs: Mapping[str, History], drawings: Mapping[str, bytes], settings: Mapping[str, Mapping[str, Any]]
) -> str:
    """The page; ``drawings``: SVG by name of the figure, ``settings``: of each run, as section.name: value."""
    parts = [f"<h1>{escape(title)}</h1>"]
    for name, history in runs.items():
        parts += [f"<h2>{escape(name)}</h2>"] if len(runs) > 1 else []
        parts += [f"<p>{escape(summary(history))}</p>", _cards(history)]
    parts += ["<h2>Curves</h2>", _figures(drawings, attempts=False)]
    if len(runs) > 1:
        parts += ["<h2>Settings in which they differ</h2>", _table(["setting", *runs], list(_differences(settings)))]
    parts += ["<h2>Attempts</h2>", _figures(drawings, attempts=True)]
    for name, history in runs.items():
        parts += [f"<h3>{escape(name)}</h3>"] if len(runs) > 1 else []
        parts.append(_table(HEADS, [_row(attempt) for attempt in history.attempts]))
    made = time.strftime("%Y-%m-%d %H:%M %Z")
    return terminal.plain(  # what looks like text must not reorder or hide any
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<footer><p>Made by hpclm report, {made}. All times are in this time zone.</p></footer>\n</body>\n</html>\n"
    )


def summary(history: History) -> str:
    """What happened to a run, for a reader who does not know it."""
    if not history.attempts:
        return "The run has not started yet."
    count, last = len(history.attempts), history.attempts[-1]
    of = f" of {last.row['steps']}" if last.row.get("steps") else ""
    text = [f"The run has done {last.last}{of} steps in {span(history.wall)}, in {_many(count, 'attempt')}."]
    if count > 1:
        lost = sum(attempt.lost for attempt in history.attempts)
        spent = (
            f"{_many(lost, 'step')} ({span(history.seconds('lost'))}) came after a checkpoint and had to be done again."
        )
        times = {1: "once", 2: "twice"}.get(count - 1, f"{count - 1} times")
        text.append(
            f"It was interrupted {times} and resumed from its last checkpoint each time; "
            + (spent if lost else "no step had to be done twice.")
        )
    if history.goodput is not None:
        text.append(f"{history.goodput:.0%} of the time went into training steps that count (goodput).")
    if history.damaged:
        text.append(f"{_many(history.damaged, 'line')} of metrics.jsonl could not be read.")
    if last.ended:
        text.append(f"The last attempt: {last.ended}.")
    else:
        text.append(f"It has not ended, as far as its files say; the last sign of life was at {_moment(last.end)}.")
    return " ".join(text)


def _moment(seconds: float) -> str:
    """A time since 1970 in this machine's time zone, which the footer names."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _time(seconds: float) -> str:
    """A time that is worth mentioning."""
    return span(seconds) if seconds >= 1 else ""


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _cards(history: History) -> str:
    """The figures of a run; those that are unknown are left out."""

    def mean(name: str) -> float:
        values = [row[name] for row in history.steps[-50:] if row.get(name)]
        return sum(values) / len(values) if values else 0.0

    last = history.steps[-1] if history.steps else {}
    held_out = [row["validation_loss"] for row in history.evaluations if row["validation_loss"] is not None]
    row = history.attempts[-1].row if history.attempts else {}
    cards = {
        "step": str(last.get("step", "")),
        "training loss": f"{last['loss']:.4f}" if last.get("loss") is not None else "",
        "validation loss": f"{held_out[-1]:.4f}" if held_out else "",
        "tokens/s": f"{mean('tokens_per_second'):,.0f}" if mean("tokens_per_second") else "",
        "MFU": f"{mean('mfu'):.1%}" if mean("mfu") else "",
        "goodput": f"{history.goodput:.1%}" if history.goodput is not None else "",
        "attempts": str(len(history.attempts)),
        "waiting in the queue": _time(history.seconds("queued")),
        "starting": _time(history.seconds("starting")),
        "steps done again": str(sum(each.lost for each in history.attempts)),
        "processes": str(row.get("size", "")),
        "hosts": str(len(row.get("hosts", []))),
    }
    shown = (f"<div><b>{escape(value)}</b><span>{name}</span></div>" for name, value in cards.items() if value)
    return f'<div class="cards">{"".join(shown)}</div>'


def _figures(drawings: Mapping[str, bytes], attempts: bool) -> str:
    parts = []
    for name, svg in drawings.items():
        kind, _, run = name.partition(" ")
        if (kind == "attempts") == attempts:
            caption = escape(f"{run}: " if run else "") + CAPTIONS.get(kind, "")
            parts.append(
                f'<figure{" class=wide" if kind in CAPTIONS else ""}><img alt="{escape(name)}" '
                f'src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"><figcaption>{caption}</figcaption></figure>'
            )
    return f'<div class="figures">{"".join(parts)}</div>'


def _row(attempt: Attempt) -> list[str]:
    row = attempt.row
    job = f"job {row['job_id']}, " if row.get("job_id") else ""
    hosts = row.get("hosts") or [row.get("host", "")]
    return [
        str(attempt.number),
        f"{attempt.first} → {attempt.last}",
        attempt.ended or "still running, or no message yet",
        str(attempt.lost) if attempt.lost else "",
        _moment(moment(row["time"]) or 0.0),
        f"{job}{', '.join(hosts[:3])}{f' and {len(hosts) - 3} more' * (len(hosts) > 3)}",
        *(_time(attempt.seconds(kind)) for kind in ("queued", "starting", "training")),
    ]


def _differences(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    for key in dict.fromkeys(key for each in settings.values() for key in each):
        values = [each.get(key) for each in settings.values()]
        if key.split(".")[0] not in PLAIN and any(value != values[0] for value in values):
            yield [key, *("–" if value is None else str(value) for value in values)]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "<p>None.</p>"
    head, *body = (
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in (("th", heads), *(("td", row) for row in rows))
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
