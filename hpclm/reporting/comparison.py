"""Several runs compared: a row for each, the best first, with the settings that differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpclm.base import terminal
from hpclm.reporting import history, provenance
from hpclm.reporting.history import History
from hpclm.reporting.provenance import Settings
from hpclm.reporting.standings import Runs, Standing, ranked
from hpclm.rundir.state import State

FIGURES = {
    "validation_loss": ("VALIDATION LOSS", ".4f"),
    "training_loss": ("TRAINING LOSS", ".4f"),
    "steps": ("STEPS", ","),
    "tokens_per_second": ("TOKENS/S", ",.0f"),
}
"""Columns of the table, with their headings and formats."""
REPORTED = 6  # most own metrics of a table


@dataclass(frozen=True)
class Entry:
    """One of several runs."""

    standing: Standing
    history: History
    settings: Mapping[str, Any]
    """The settings that differ between the runs; None where this run has no value."""
    reported: Mapping[str, float | None]
    """The mean over the last steps of each metric that any run reports."""

    @property
    def name(self) -> str:
        """A name that no other run has."""
        return self.standing.name

    @property
    def figures(self) -> dict[str, Any]:
        """Its results, under the names that ``rows`` and FIGURES have."""
        steps = self.history.steps["step"]
        return {
            "steps": int(steps[-1]) if len(steps) else 0,
            "training_loss": self.standing.training,
            "validation_loss": self.standing.best,
            "validation_step": self.standing.best_step,
            "tokens_per_second": self.history.mean("tokens_per_second"),
            "diverged": self.standing.diverged,
        }


def names(chosen: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, preceded by as many parents as it takes to tell the runs apart."""
    paths = [path.resolve() for path in chosen]
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        short = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(short)) == len(short):
            return short
    return [str(path) for path in paths]


def differing(settings: Mapping[str, Settings]) -> dict[str, dict[str, Any]]:
    """Setting -> run -> value, for settings that differ between runs and may change a result."""
    rows = provenance.differing(settings)
    return {key: row for key, row in rows.items() if not provenance.IDLE.fullmatch(key)}


def entries(runs: Runs, settings: Mapping[str, Settings]) -> list[Entry]:
    """The runs, the best first."""
    unlike = differing(settings)
    reported = dict.fromkeys(name for run in runs.values() for name in run.steps.reported)
    compared = []
    for standing in ranked(runs):
        run = runs[standing.name]
        own = {key: values.get(standing.name) for key, values in unlike.items()}
        compared.append(Entry(standing, run, own, {name: run.mean(name) for name in reported}))
    return compared


def rows(statuses: Sequence[State]) -> list[dict[str, Any]]:
    """A row for each run, the best first; losses in nats per token, None for what was not measured.

    The settings that differ have their names as keys, such as ``optim.lr``, and so have metrics that the user's code reports.
    """
    compared = []
    for entry, status in _with_status(statuses):
        row = {"run": entry.name, "status": status.name, **entry.settings, **entry.figures}
        row |= {"loss": status.run.summary.get("loss"), "path": str(status.run.out)}
        compared.append(row | {name: value for name, value in entry.reported.items() if name not in row})
    return compared


def table(statuses: Sequence[State]) -> Iterator[str]:
    """The comparison as lines of text, with a header."""
    compared = _with_status(statuses)
    first = compared[0][0] if compared else None
    settings = list(first.settings) if first else []
    own = {name: (name, ".4g") for name in list(first.reported)[:REPORTED]} if first else {}
    columns = {key: column for key, column in {**FIGURES, **own}.items() if _has(compared, key)}
    lines = [["RUN", "STATE", *settings, *(heading for heading, _ in columns.values())]]
    for entry, status in compared:
        diverged = entry.standing.diverged
        state = status.name if diverged is None else f"diverged at step {diverged}"
        values = {**entry.reported, **entry.figures}
        figures = ("-" if values[key] is None else format(values[key], form) for key, (_, form) in columns.items())
        lines.append([entry.name, state, *map(provenance.shown, entry.settings.values()), *figures])
    yield from terminal.columns([[terminal.line(cell) for cell in line] for line in lines])


def _with_status(statuses: Sequence[State]) -> list[tuple[Entry, State]]:
    """The runs with their states, the best first."""
    by_name = dict(zip(names([status.run.out for status in statuses]), statuses, strict=True))
    runs = {name: history.read(status.run.out) for name, status in by_name.items()}
    settings = {name: provenance.settings(status.run.out) for name, status in by_name.items()}
    return [(entry, by_name[entry.name]) for entry in entries(runs, settings)]


def _has(compared: Sequence[tuple[Entry, State]], key: str) -> bool:
    """Whether a run has this figure."""
    return any({**entry.reported, **entry.figures}[key] is not None for entry, _ in compared)
