"""The report of a preflight check: kept in the run directory, and read by ``hpclm submit --exclude-bad``."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpclm import files, terminal
from hpclm.diagnostics import verdict
from hpclm.errors import ConfigError
from hpclm.node.facts import Facts
from hpclm.rundir.runs import resolve

FILE = "preflight.json"
GIB = 1 << 30
KEPT = 50  # earlier reports, in short


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
    removed: list[str]
    """Abandoned locks that were removed."""
    ranks: list[Facts]
    pairs: list[dict[str, Any]]
    """Nodes, and GB/s of an all-reduce between them."""
    all_reduce: float | None
    """GB/s of an all-reduce over all processes."""
    disks: dict[str, Any] = field(default_factory=dict)
    """What each node found in the run directory."""

    def write(self, out: Path) -> None:
        """Write it to preflight.json, with a summary of earlier reports."""
        content = asdict(self) | {"earlier": earlier(out)}
        files.write_text(
            out / FILE, json.dumps(content, indent=1) + "\n"
        )  # an earlier report may hold half a character

    def line(self) -> str:
        """The report in one line."""
        nodes = verdict.nodes_of(self.ranks)
        count = f"{len(self.ranks)} rank{'s' * (len(self.ranks) != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}"
        speeds = [pair["speed"] for pair in self.pairs]
        parts = [
            f"{count} agree" if self.ok else f"{count}, {len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        ]
        if speeds:
            parts.append(f"slowest pair {verdict.rate(min(speeds))}")
        elif self.all_reduce:
            parts.append(f"all-reduce {verdict.rate(self.all_reduce)}")
        return f"preflight: {'; '.join(parts)}; {self.seconds:.1f} s"

    def table(self) -> str:
        """A row for each node."""
        head = ("node", "ranks", "device", "torch", "driver", "clock", "/dev/shm", "out free", "links GB/s", "")
        rows = [head]
        for node, members in verdict.nodes_of(self.ranks).items():
            first = self.ranks[members[0]]
            speeds = [pair["speed"] for pair in self.pairs if node in pair["nodes"]]
            rows.append(
                (
                    node,
                    f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]),
                    str(first.get("device_name")),
                    str(first.get("torch")),
                    str(first.get("driver") or "-"),
                    f"{first['clock']:+.2f} s",
                    gib(first["shm"]["free"]) if first.get("shm") else "-",
                    gib(self.disks.get(node, {}).get("free")),
                    f"{min(speeds):.3g}..{max(speeds):.3g}" if speeds else "-",
                    "BAD" if node in self.bad else "",
                )
            )
        return "\n".join(terminal.columns(rows))


def earlier(out: Path) -> list[dict[str, Any]]:
    """Summaries of the reports so far, oldest first."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        last = json.loads(files.read_text(out / FILE))
        short = {key: last.get(key) for key in ("time", "ok", "bad", "problems", "ended")}
        return [*last.get("earlier", []), short][-KEPT:]
    return []


def gib(count: int | None) -> str:
    """Bytes in GiB."""
    return "-" if count is None else f"{count / GIB:.1f} GiB"


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
