"""Nodes to keep away from: those that an earlier start of a run found to be bad."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.job.runs import resolve

NAME = "preflight.json"


def bad_nodes(runs: Sequence[str]) -> list[str]:
    """Names of the nodes that preflight.json of the run directories ``runs`` calls bad; ConfigError where none is readable."""
    found: list[str] = []
    for run in runs:
        out = Path(run) if (Path(run) / NAME).exists() else resolve(run, Path("runs"))
        path = files.readable(out / NAME, "--exclude-bad: what preflight found")
        try:
            names = json.loads(path.read_text(encoding="utf-8"))["bad"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"--exclude-bad: {path} does not say which nodes are bad") from None
        wrong = [name for name in names if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", str(name))]
        if wrong:
            raise ConfigError(f"--exclude-bad: {path} names {wrong[0]!r}, which is no node")
        found += map(str, names)
    return list(dict.fromkeys(found))
