"""Start hpclm as a person does, and read what it leaves."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def hpclm(*words, check=None, **kwargs):
    """Run ``hpclm WORDS`` in a process of its own; ``check`` is the exit code it must end with."""
    command = [sys.executable, "-m", "hpclm", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=kwargs.pop("cwd", ROOT), **kwargs)
    assert check is None or done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def losses(out):
    """step -> loss in hex, from metrics.jsonl; every step once."""
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    found = {row["step"]: (row["loss"] or 0.0).hex() for row in steps}
    assert len(found) == len(steps)
    return found
