"""The report of a preflight check: kept in the run directory, and read by ``hpclm submit --exclude-bad``."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.diagnostics import verdict
from hpclm.errors import ConfigError
from hpclm.node.facts import Facts
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

    def write(self, out: Path) -> None:
        """Write it to preflight.json."""
        files.write_text(out / FILE, json.dumps(asdict(self), indent=1) + "\n")

    def line(self) -> str:
        """The report in one line."""
        nodes = verdict.nodes_of(self.ranks)
        count = f"{len(self.ranks)} rank{'s' * (len(self.ranks) != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}"
        parts = [
            f"{count} agree" if self.ok else f"{count}, {len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        ]
        if self.links:
            parts.append(f"slowest link {verdict.rate(min(link['speed'] for link in self.links))}")
        return f"preflight: {'; '.join(parts)}; {self.seconds:.1f} s"


def bad_nodes(runs: Sequence[str]) -> list[str]:
    """Nodes that the reports of the run directories ``runs`` call bad; ConfigError where one cannot be read."""
    found: list[str] = []
    for run in runs:
        out = Path(run) if (Path(run) / FILE).exists() else resolve(run, Path("runs"))
        path = files.readable(out / FILE, "--exclude-bad: the preflight report")
        try:
            names = json.loads(files.read_text(path))["bad"]
            if not isinstance(names, list):
                raise TypeError
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"--exclude-bad: {path} does not list bad nodes") from None
        wrong = [name for name in names if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", str(name))]
        if wrong:
            raise ConfigError(f"--exclude-bad: {path} lists {wrong[0]!r}, which is not a node name")
        found += map(str, names)
    return list(dict.fromkeys(found))
