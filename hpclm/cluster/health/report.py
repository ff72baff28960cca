"""The outcome of a preflight check: kept in the run directory, read by a person and by ``hpclm submit --exclude-bad``."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.cluster.health import verdict
from hpclm.cluster.health.facts import Facts

FILE = "preflight.json"
KEPT = 50  # earlier outcomes


@dataclass(frozen=True)
class Report:
    """What a preflight check found."""

    time: str
    ok: bool
    seconds: float
    problems: list[str]
    """What must be put right before the run can begin."""
    warnings: list[str]
    bad: list[str]
    """Nodes to do without."""
    ended: list[str]
    """Processes of earlier attempts that were ended."""
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
        """Keep it as preflight.json, with what the checks before it said in few words."""
        content = asdict(self) | {"earlier": earlier(out)}
        files.write_text(out / FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def line(self) -> str:
        """The outcome in a line."""
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
                    size(first["shm"]["free"]) if first.get("shm") else "-",
                    size(self.disks.get(node, {}).get("free")),
                    f"{min(speeds):.3g}..{max(speeds):.3g}" if speeds else "-",
                    "BAD" if node in self.bad else "",
                )
            )
        return aligned(rows)


def earlier(out: Path) -> list[dict[str, Any]]:
    """What the checks so far said, oldest first: time, ok, bad, problems."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        last = json.loads((out / FILE).read_text(encoding="utf-8"))
        short = {key: last.get(key) for key in ("time", "ok", "bad", "problems", "ended")}
        return [*last.get("earlier", []), short][-KEPT:]
    return []


def size(count: int | None) -> str:
    """Bytes in GiB."""
    return "-" if count is None else f"{count / verdict.GIB:.1f} GiB"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of words in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
