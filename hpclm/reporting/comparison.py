"""Several runs compared: a row for each, the best first, with the settings in which they differ."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpclm import terminal
from hpclm.reporting import curves, history, provenance
from hpclm.reporting.history import History
from hpclm.reporting.provenance import Settings
from hpclm.rundir.state import State

FIGURES = {
    "validation_loss": ("VALIDATION LOSS", ".4f"),
    "training_loss": ("TRAINING LOSS", ".4f"),
    "steps": ("STEPS", ","),
    "tokens_per_second": ("TOKENS/S", ",.0f"),
}
"""Columns of the table, with their headings and formats."""
REPORTED = 6
"""Own metrics that a comparison shows, at most."""


def names(chosen: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, with those above it where that is not enough to tell them apart."""
    paths = [path.resolve() for path in chosen]
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        short = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(short)) == len(short):
            return short
    return [str(path) for path in paths]


def differing(settings: Mapping[str, Settings]) -> dict[str, dict[str, Any]]:
    """Setting -> run -> value, of the settings in which runs differ and which may change a result."""
    rows = provenance.differing(settings)
    return {key: row for key, row in rows.items() if not provenance.IDLE.fullmatch(key)}


def tokens_per_second(run: History) -> float | None:
    """The mean of a run's last steps; None if it has trained none."""
    rates = [row["tokens_per_second"] for row in run.recent if row.get("tokens_per_second")]
    return sum(rates) / len(rates) if rates else None


def rows(statuses: Sequence[State]) -> list[dict[str, Any]]:
    """A row for each run, the best first as in its report; losses in nats per token, None for what was not measured.

    The settings in which the runs differ have their own names as keys: ``optim.lr``; so has what the user's code reports, of which it is
    the mean over the last steps.
    """
    by_name = dict(zip(names([status.run.out for status in statuses]), statuses, strict=True))
    histories = {name: history.read(status.run.out) for name, status in by_name.items()}
    unlike = differing({name: provenance.settings(status.run.out) for name, status in by_name.items()})
    reported = dict.fromkeys(name for run in histories.values() for name in run.steps.reported)
    compared = []
    for standing in curves.ranked(histories):
        status, steps = by_name[standing.name], histories[standing.name].steps["step"]
        row = {
            "run": standing.name,
            "status": status.name,
            **{key: values.get(standing.name) for key, values in unlike.items()},
            "steps": int(steps[-1]) if len(steps) else 0,
            "loss": status.run.summary.get("loss"),
            "training_loss": standing.training,
            "validation_loss": standing.best,
            "validation_step": standing.best_step,
            "tokens_per_second": tokens_per_second(histories[standing.name]),
            "diverged": standing.diverged,
            "path": str(status.run.out),
        }
        means = histories[standing.name].reported
        compared.append(row | {name: means.get(name) for name in reported if name not in row})
    return compared


def table(statuses: Sequence[State]) -> Iterator[str]:
    """``rows`` as lines of text, with a header."""
    compared = rows(statuses)
    keys = list(compared[0]) if compared else ["run", "status", "steps", "path"]
    settings, reported = keys[2 : keys.index("steps")], keys[keys.index("path") + 1 :]
    columns = FIGURES | {name: (name, ".4g") for name in reported[:REPORTED]}
    shown = [key for key in columns if any(row[key] is not None for row in compared)]
    lines = [["RUN", "STATE", *settings, *(columns[key][0] for key in shown)]]
    for row in compared:
        state = row["status"] if row["diverged"] is None else f"diverged at step {row['diverged']}"
        figures = ("-" if row[key] is None else format(row[key], columns[key][1]) for key in shown)
        lines.append([row["run"], state, *(provenance.shown(row[key]) for key in settings), *figures])
    yield from terminal.columns([[terminal.line(cell) for cell in line] for line in lines])
