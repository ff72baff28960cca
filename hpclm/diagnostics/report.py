"""The report of a preflight check, as ``hpclm submit --exclude-bad`` reads it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.rundir.runs import resolve

FILE = "preflight.json"
"""Its name in the run directory."""


def bad_nodes(runs: Sequence[str]) -> list[str]:
    """Nodes that the reports of the run directories ``runs`` call bad; ConfigError where one cannot be read."""
    nodes: dict[str, None] = {}
    for run in runs:
        out = Path(run) if (Path(run) / FILE).exists() else resolve(run, Path("runs"))
        path = files.readable(out / FILE, "--exclude-bad: the preflight report")
        try:
            names = [*map(str, json.loads(files.read_text(path))["bad"])]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"--exclude-bad: {path} does not list bad nodes") from None
        wrong = [name for name in names if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name)]
        if wrong:
            raise ConfigError(f"--exclude-bad: {path} lists {wrong[0]!r}, which is not a node name")
        nodes |= dict.fromkeys(names)
    return list(nodes)
