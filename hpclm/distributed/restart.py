"""Restarts inside a job: the exit code and cause that a rank leaves for torchrun, and why torchrun restarted the ranks."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpclm import files

Env = Mapping[str, str]
RESTARTED = "HPCLM_RESTARTED"
"""Variable that says why torchrun has restarted the ranks."""
CAUSE = 500  # characters of it that are kept


def note(code: int, cause: str = "", env: Env = os.environ) -> None:
    """Leave this rank's exit code for torchrun, and the cause, in the file that it names; the first note counts."""
    path = Path(env.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if code and not path.exists():
        lines = cause.strip().splitlines() or [f"a rank ended with exit code {code}"]
        cause = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"
        cause = "".join(c if c.isprintable() else " " for c in cause[:CAUSE])
        with suppress(OSError):
            now = time.time()
            content = {"message": cause, "timestamp": int(now), "time": now, "exit_code": code}
            files.write_text(path, json.dumps(content))


def inside_the_job(env: Env = os.environ) -> str:
    """Why torchrun restarted the ranks; empty if it did not."""
    return env.get(RESTARTED, "")
