"""The report of a preflight check: kept in the run directory, and read by ``hpclm submit --exclude-bad``."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.diagnostics import verdict
from hpclm.diagnostics.facts import Facts
from hpclm.errors import ConfigError
from hpclm.rundir.runs import resolve

FILE = "preflight.json"


@dataclass(frozen=True)
class Report:
    """What a preflight check found."""

    time: str
    ok: bool
    seconds: float
    problems: list[str]
    """What must be fixed before the run can start."""
    warnings: list[str]
    bad: list[str]
    """Nodes to exclude."""
    ended: list[str]
    """Processes of earlier attempts that were terminated."""
    ranks: list[Facts]
    links: list[dict[str, Any]]
    """From one node to the next, and GB/s between them."""
    disks: dict[str, Any] = field(default_factory=dict)
    """What each node found in the run directory."""

    def line(self) -> str:
        """The report in one line."""
        ranks, nodes, problems = len(self.ranks), len(verdict.nodes_of(self.ranks)), len(self.problems)
        state = " agree" if self.ok else f", {problems} problem{'s' * (problems != 1)}"
        link = f"; slowest link {verdict.rate(min(link['speed'] for link in self.links))}" if self.links else ""
        return f"preflight: {ranks} ranks on {nodes} node{'s' * (nodes != 1)}{state}{link}; {self.seconds:.1f} s"


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
