"""Nodes at fault, for ``hpclm submit --exclude-bad``: from the last preflight check, and from silent corruption."""

import re
from collections.abc import Sequence
from pathlib import Path

from hpclm.base.errors import ConfigError
from hpclm.rundir import events
from hpclm.rundir.runs import resolve


def bad_nodes(runs: Sequence[str]) -> list[str]:
    """Nodes that the run directories ``runs`` list as bad; ConfigError if a report cannot be read."""
    nodes: dict[str, None] = {}
    for run in runs:
        out = resolve(run, Path("runs"))
        happened = events.read_or_refuse(out)
        found = [*events.of_kind(happened, "preflight")[-1:], *events.of_kind(happened, "corrupt")]
        if not found:
            raise ConfigError(f"--exclude-bad: {out} has neither a preflight check nor silent corruption in its record")
        names = [str(name) for event in found for name in event.get("bad") or []]
        wrong = [name for name in names if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name)]
        if wrong:
            raise ConfigError(f"--exclude-bad: {out} lists {wrong[0]!r}, which is not a node name")
        nodes |= dict.fromkeys(names)
    return list(nodes)
