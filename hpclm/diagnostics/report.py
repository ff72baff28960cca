"""Nodes at fault, for ``hpclm submit --exclude-bad``: those of the last preflight check, and those of silent corruption."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError, unread
from hpclm.rundir import rows
from hpclm.rundir.runs import resolve

FILE = "preflight.json"
"""Name in the run directory of the preflight check's report."""
CORRUPTION = "corruption.jsonl"
"""Name in the run directory of the findings of silent corruption, a line for each."""


def bad_nodes(runs: Sequence[str]) -> list[str]:
    """Nodes that the run directories ``runs`` call bad; ConfigError where a report cannot be read."""
    nodes: dict[str, None] = {}
    for run in runs:
        direct = any((Path(run) / name).exists() for name in (FILE, CORRUPTION))
        out = Path(run) if direct else resolve(run, Path("runs"))
        noted = rows.last(out / CORRUPTION, {"bad": list}, ["bad"])
        path = out / FILE
        if path.exists() or not noted:
            files.readable(path, "--exclude-bad: the preflight report")
        try:
            names = [*map(str, json.loads(files.read_text(path))["bad"])] if path.exists() else []
            names += [str(name) for row in noted for name in row["bad"]]
        except OSError as error:
            raise unread(error, f"--exclude-bad: {path}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"--exclude-bad: {path} does not list bad nodes") from None
        wrong = [name for name in names if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name)]
        if wrong:
            raise ConfigError(f"--exclude-bad: {out} lists {wrong[0]!r}, which is not a node name")
        nodes |= dict.fromkeys(names)
    return list(nodes)
