"""How far a sink has come in metrics.jsonl: kept in the run directory, so that no attempt sends a row twice."""

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpclm import files
from hpclm.rundir import rows
from hpclm.sinks import Row

LARGEST = 1 << 20  # bytes
NEEDED = {"id": str, **dict.fromkeys(("step", "rows", "rollbacks"), int), "parts": list}
FIELDS = {**NEEDED, "scored": int}


@dataclass(frozen=True)
class Position:
    """What a sink has received."""

    id: str
    """Of the run in the sink."""
    rollbacks: int
    """How often the run had gone back to an older checkpoint (``--from``) when the id was chosen."""
    step: int = 0
    """Up to here it has every row."""
    parts: tuple[str, ...] = ()
    """The kinds of rows that it has of that step: "train", or the part of an evaluation."""
    rows: int = 0
    """In all."""
    scored: int = 0
    """Up to this step it has the scores at tasks, which come later than the other rows of their step."""

    def is_new(self, row: Row) -> bool:
        """Whether the sink lacks ``row``: not one of a step that an earlier attempt did and this one did again."""
        if "tasks" in row:
            return bool(row["step"] > self.scored)
        return row["step"] > self.step or (row["step"] == self.step and kind(row) not in self.parts)

    def after(self, sent: Iterable[Row]) -> "Position":
        """The position once ``sent`` have been received."""
        here = self
        for row in sent:
            if "tasks" in row:
                here = replace(here, scored=row["step"], rows=here.rows + 1)
                continue
            parts = here.parts if row["step"] == here.step else ()
            here = replace(here, step=row["step"], parts=(*parts, kind(row)), rows=here.rows + 1)
        return here


def kind(row: Row) -> str:
    """``train``, or the part that was evaluated."""
    return str(row.get("part", "valid")) if "validation_loss" in row else "train"


def path(out: Path, sink: str) -> Path:
    """The file of the sink's position."""
    return out / "sinks" / f"{sink.replace(':', '-')}.json"


def lock(out: Path, sink: str) -> Path:
    """The file to lock while rows are sent to the sink."""
    where = path(out, sink).with_suffix(".lock")
    where.parent.mkdir(mode=0o700, exist_ok=True)
    return where


def read(out: Path, sink: str) -> Position:
    """The sink's position; a new one with a new id if there is none, or if the run has gone back since."""
    rollbacks = sum(1 for _ in out.glob("metrics.rolled-back-*.jsonl"))
    try:
        row = rows.parsed(files.read_text(path(out, sink), LARGEST, errors="replace"), FIELDS, NEEDED)
    except FileNotFoundError:
        row = None
    if row and row["rollbacks"] == rollbacks:
        return Position(row["id"], rollbacks, row["step"], tuple(row["parts"]), row["rows"], row.get("scored", 0))
    return Position(secrets.token_hex(4), rollbacks)


def write(out: Path, sink: str, position: Position) -> None:
    """Keep the position."""
    files.write_text(path(out, sink), json.dumps(asdict(position)) + "\n")
