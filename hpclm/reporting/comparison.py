"""Compare several runs: a row for each, the best first, with the settings that differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpclm.base import terminal
from hpclm.reporting import history, provenance
from hpclm.reporting.history import History
from hpclm.reporting.provenance import Settings
from hpclm.reporting.standings import Runs, Standing, ranked
from hpclm.rundir.branches import resolved
from hpclm.rundir.state import State

FIGURES = {
    "validation_loss": ("VALIDATION LOSS", ".4f"),
    "bits_per_byte": ("BITS/BYTE", ".4f"),
    "training_loss": ("MEAN TRAINING LOSS", ".4f"),
    "steps": ("STEPS", ","),
    "tokens_per_second": ("TOKENS/S", ",.0f"),
}
"""Columns of the table, with their headings and formats."""
REPORTED = 6  # maximum number of columns with metrics that the user's code reports


@dataclass(frozen=True)
class Entry:
    """One of the compared runs."""

    standing: Standing
    history: History
    settings: Mapping[str, Any]
    """The settings that differ between the runs; None where this run has no value."""
    reported: Mapping[str, float | None]
    """The mean over the last steps of each metric that any run reports."""

    @property
    def name(self) -> str:
        """A name that no other run of the comparison has."""
        return self.standing.name

    @property
    def figures(self) -> dict[str, Any]:
        """The run's results, by the names in FIGURES and ``rows``."""
        steps = self.history.steps["step"]
        return {
            "steps": int(steps[-1]) if len(steps) else 0,
            "training_loss": self.standing.training,
            "validation_loss": self.standing.best,
            "validation_step": self.standing.best_step,
            "bits_per_byte": self.standing.bits_per_byte,
            "tokens_per_second": self.history.mean("tokens_per_second"),
            "diverged": self.standing.diverged,
        }


def names(chosen: Sequence[Path]) -> list[str]:
    """A name for each run: its folder, preceded by as many parents as make the names unique."""
    paths = [path.resolve() for path in chosen]
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        short = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(short)) == len(short):
            return short
    return [str(path) for path in paths]


def trunks(runs: Runs) -> dict[str, str]:
    """Name -> the run that it goes on from, in words, for runs that are branches."""
    listed = {resolved(run.out): name for name, run in runs.items()}
    return {name: f"Branch of {run.trunk.described(listed)}" for name, run in runs.items() if run.trunk}


def differing(settings: Mapping[str, Settings]) -> dict[str, dict[str, Any]]:
    """Setting -> run -> value, for settings that differ between runs and may change results."""
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
    """A row for each run, the best first. Losses are in nats per token; values that were not measured are None.

    The keys include the settings that differ, such as ``optim.lr``, and metrics that the user's code reports.
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
    settings: list[str] = []
    own: dict[str, tuple[str, str]] = {}
    for entry, _ in compared[:1]:
        settings = list(entry.settings)
        own = {name: (name, ".4g") for name in list(entry.reported)[:REPORTED]}
    columns = {key: column for key, column in {**FIGURES, **own}.items() if _has(compared, key)}
    lines = [["RUN", "STATE", *settings, *(heading for heading, _ in columns.values())]]
    for entry, status in compared:
        state = status.name
        if entry.standing.diverged is not None:
            state = f"diverged at step {entry.standing.diverged}"
        values = {**entry.reported, **entry.figures}
        figures = ("-" if values[key] is None else format(values[key], form) for key, (_, form) in columns.items())
        lines.append([entry.name, state, *map(provenance.shown, entry.settings.values()), *figures])
    yield from terminal.columns([[terminal.line(cell) for cell in line] for line in lines])


def _with_status(statuses: Sequence[State]) -> list[tuple[Entry, State]]:
    by_name = dict(zip(names([status.run.out for status in statuses]), statuses, strict=True))
    runs = {name: history.read_history(status.run.out) for name, status in by_name.items()}
    settings = {name: provenance.settings_of_run(status.run.out) for name, status in by_name.items()}
    return [(entry, by_name[entry.name]) for entry in entries(runs, settings)]


def _has(compared: Sequence[tuple[Entry, State]], key: str) -> bool:
    return any({**entry.reported, **entry.figures}[key] is not None for entry, _ in compared)
