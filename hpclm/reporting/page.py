"""A report as one HTML page that needs nothing else: it opens offline, on a phone and in print, in light and dark."""

import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from hpclm import terminal
from hpclm.reporting.history import Attempt, History
from hpclm.rundir.status import moment, span

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6877; --line: #d8dde3; --ground: #ffffff; --card: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa6b4; --line: #37414d; --ground: #14181d; --card: #1d232b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--ground); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.soft, footer { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; }
.cards div { background: var(--card); border-radius: .4rem; padding: .5rem .7rem; }
.cards b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.cards span { color: var(--soft); font-size: .8rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1rem; }
figure { margin: 0; break-inside: avoid; } figure.wide { grid-column: 1 / -1; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figure.wide { overflow-x: auto; } figure.wide svg { min-width: 30rem; max-width: 60rem; }
figcaption { color: var(--soft); font-size: .85rem; }
@media screen and (max-width: 32rem) { figure.wide figcaption::before { content: "Scroll the figure sideways to see all of it. "; } }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { white-space: nowrap; } tr { break-inside: avoid; }
td:not(.n) { min-width: 13rem; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; } code { overflow-wrap: anywhere; }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --ground: #fff; --card: #f3f3f3; }
  html { font-size: 10px; } body { max-width: none; font-size: 1rem; padding: 0; } .figures { grid-template-columns: 1fr 1fr; } h2 { break-after: avoid; }
}
"""
CAPTIONS = {
    "loss": "Loss per step, and on held-out data where it was measured. A band is the range of the steps that a point stands for.",
    "attempts": "Every attempt of the run from when it was queued to its last sign of life. Lost: steps that the next attempt "
    "did again, because they came after the last checkpoint. Where there is no bar, no attempt was running, or known to be queued.",
}
PLAIN = ("out", "name", "job", "cluster")
"""Settings that say where a run is and not what it is."""


def page(
    title: str, runs: Mapping[str, History], drawings: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]]
) -> str:
    """The page; ``drawings``: SVG by name of the figure, ``settings``: of each run, as section.name: value."""
    parts = [f"<h1>{escape(title)}</h1>"]
    for name, history in runs.items():
        parts += [f"<h2>{escape(name)}</h2>"] if len(runs) > 1 else []
        parts += [f"<p>{escape(summary(history))}</p>", _cards(history)]
    parts.append(f'<h2>Curves</h2><div class="figures">{"".join(_figures(drawings, attempts=False))}</div>')
    if len(runs) > 1:
        parts += ["<h2>Settings in which they differ</h2>", _table(["setting", *runs], list(_differences(settings)))]
    parts.append(f'<h2>Attempts</h2><div class="figures">{"".join(_figures(drawings, attempts=True))}</div>')
    for name, history in runs.items():
        parts += [f"<h3>{escape(name)}</h3>"] if len(runs) > 1 else []
        rows = [_row(attempt, history) for attempt in history.attempts]
        said = [place for place in range(len(HEADS)) if any(row[place] for row in rows)]
        parts.append(_table([HEADS[place] for place in said], [[row[place] for place in said] for row in rows]))
    made = time.strftime("%Y-%m-%d %H:%M %Z")
    return terminal.plain(  # figures too: what looks like text must not reorder or hide any
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
    words = [f"The run has done {last.last}{of} steps in {span(history.wall)}, in {_many(count, 'attempt')}."]
    if count > 1:
        lost = sum(attempt.lost for attempt in history.attempts)
        words.append(
            f"It was interrupted {_times(count - 1)} and resumed from its last checkpoint each time; "
            + (
                f"{_many(lost, 'step')} ({span(history.seconds('lost'))}) came after a checkpoint and had to be done again."
                if lost
                else "no step had to be done twice."
            )
        )
    if history.goodput is not None:
        words.append(f"{history.goodput:.0%} of the time went into training steps that count (goodput).")
    if history.damaged:
        words.append(
            f"{_many(history.damaged, 'line')} of metrics.jsonl that cannot be read {'is' if history.damaged == 1 else 'are'} left out."
        )
    if last.ended:
        words.append(f"The last attempt: {last.ended}.")
    else:
        words.append(f"It has not ended, as far as its files say; the last sign of life was at {_moment(last.end)}.")
    return " ".join(words)


def _moment(seconds: float) -> str:
    """A time since 1970 in this machine's time zone, which the footer names."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _time(seconds: float) -> str:
    """A time that is worth mentioning."""
    return span(seconds) if seconds >= 1 else ""


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _cards(history: History) -> str:
    steps, held_out = history.steps, [row for row in history.evaluations if row["validation_loss"] is not None]
    last, tail = (steps[-1] if steps else {}), steps[-50:]
    speeds = [row["tokens_per_second"] for row in tail if row.get("tokens_per_second")]
    used = [row["mfu"] for row in tail if row.get("mfu")]
    attempt = history.attempts[-1] if history.attempts else None
    cards = {
        "step": str(last.get("step", "")),
        "training loss": f"{last['loss']:.4f}" if last.get("loss") is not None else "",
        "validation loss": f"{held_out[-1]['validation_loss']:.4f}" if held_out else "",
        "tokens/s": f"{sum(speeds) / len(speeds):,.0f}" if speeds else "",
        "MFU": f"{sum(used) / len(used):.1%}" if used else "",
        "goodput": f"{history.goodput:.1%}" if history.goodput is not None else "",
        "attempts": str(len(history.attempts)),
        "waiting in the queue": _time(history.seconds("queued")),
        "starting": _time(history.seconds("starting")),
        "steps done again": str(sum(each.lost for each in history.attempts)),
        "processes": str(attempt.row.get("size", "")) if attempt else "",
        "hosts": str(len(attempt.row.get("hosts", []))) if attempt else "",
    }
    return (
        '<div class="cards">'
        + "".join(f"<div><b>{escape(value)}</b><span>{name}</span></div>" for name, value in cards.items() if value)
        + "</div>"
    )


def _figures(drawings: Mapping[str, str], attempts: bool) -> Iterator[str]:
    for name, svg in drawings.items():
        kind, _, run = name.partition(" ")
        if (kind == "attempts") == attempts:
            wide = ' class="wide"' if kind in CAPTIONS else ""
            said = CAPTIONS.get(kind, "")
            caption = f"<figcaption>{escape(f'{run}: ' if run else '')}{said}</figcaption>" if said or run else ""
            yield f"<figure{wide}>{svg}{caption}</figure>"


HEADS = ("attempt", "steps", "ended", "done again", "began", "where", "queued", "starting", "training")


def _row(attempt: Attempt, history: History) -> list[str]:
    row = attempt.row
    job = f"job {row['job_id']}, " if row.get("job_id") else ""
    hosts = row.get("hosts") or [row.get("host", "")]
    where = f"{job}{', '.join(hosts[:3])}{f' and {len(hosts) - 3} more' * (len(hosts) > 3)}"
    return [
        str(attempt.number),
        f"{attempt.first} → {attempt.last}",
        attempt.ended or "still running, or no message yet",
        str(attempt.lost) if attempt.lost else "",
        _moment(moment(row["time"]) or 0.0),
        where,
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
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f'<td class="n">{escape(c)}</td>' if len(c) < 20 else f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)  # fmt: skip
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
