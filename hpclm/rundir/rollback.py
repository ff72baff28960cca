"""The request to roll back to an older checkpoint: rollback.json in the run directory, until an attempt has carried it out.

It is written before the run is submitted, and removed after everything newer has been set aside. Whatever is killed in
between, the next attempt rolls back to that step, and only once.
"""

import json
import time
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.rundir import rows

NAME = "rollback.json"
FIELDS = {"step": rows.whole, "time": rows.text}


def ask(out: Path, step: int) -> None:
    """Request that the next attempt of the run in ``out`` resumes from the checkpoint of ``step``."""
    files.sweep(out / NAME)  # left by a killed process
    files.write_text(out / NAME, json.dumps({"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n")


def pending(out: Path) -> int | None:
    """The step that the next attempt rolls back to, None without a request; ConfigError for a file without a step."""
    path = out / NAME
    if not path.exists():
        return None
    row = rows.parsed(rows.tail(path), FIELDS, ["step"])
    if row is None:
        raise ConfigError(f"{path} has no step to go back to; remove it, and repeat --from STEP")
    return int(row["step"])


def withdraw(out: Path) -> None:
    """Remove the request, when it is withdrawn or carried out."""
    (out / NAME).unlink(missing_ok=True)
    files.sync(out)
