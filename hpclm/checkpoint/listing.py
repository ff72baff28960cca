"""List a run's checkpoints, and verify them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm.base import files, terminal
from hpclm.base.errors import ConfigError, HpclmError, NoCheckpointError
from hpclm.base.progress import Bar
from hpclm.checkpoint import directory, retention
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest

MAX_REASON_BYTES = 1 << 16
USABLE = ("good", "complete")
"""States of checkpoints that can be loaded."""


def rows(folder: Path, verify: bool) -> Iterator[dict[str, Any]]:
    """One row for each checkpoint in ``folder``, and for each one that was set aside."""
    steps = directory.steps(folder)
    read = dict[Path, Manifest]()
    problems = dict[Path, Exception]()
    for step in steps:
        try:
            read[step] = manifests.read_manifest(step)
        except (BadCheckpoint, OSError, ConfigError) as error:
            problems[step] = error
    healthy = retention.healthy([*read.values()])
    for step in steps:
        row: dict[str, Any] = {"name": step.name, "state": "complete", "reason": ""}
        try:
            if step in problems:
                raise problems[step]
            manifest = read[step]
            origin = manifest.made
            number = manifest.progress["step"]
            row |= {"step": number, "bytes": manifest.size, "files": len(manifest.files)}
            row |= {
                "validation_loss": manifest.validation,
                "time": origin.get("time"),
                "seconds": origin.get("seconds"),
            }
            row |= {"engine": origin.get("engine"), "processes": origin.get("processes")}
            row |= {"why": manifest.why, "healthy": healthy.get(number, True), "health": manifest.health.describe()}
            if not row["healthy"] and not row["health"]:
                row["health"] = "the loss spiked in the next step"
            manifests.check_sizes(step, manifest)
            if verify:
                from hpclm.checkpoint import format  # imports PyTorch

                nan: list[str] = []
                for name in Bar(manifest.files, desc=step.name, unit="file", disable=None, leave=False):
                    nan += format.verify(step, manifest, [name])
                row["state"] = "good"
                if nan:
                    more = f" and {len(nan) - 1} other tensors" if len(nan) > 1 else ""
                    row |= {"healthy": False, "health": f"values are not finite in {nan[0]}{more}"}
        except BadCheckpoint as error:
            row |= {"state": "bad", "reason": str(error)}
        except (OSError, ConfigError) as error:
            row |= {"state": "unreadable", "reason": str(error)}
        yield row
    for away in sorted([*folder.glob(".bad-*"), *folder.glob(".rolled-back-*")]):
        reason = ""
        with suppress(OSError):
            reason = files.read_text(away / "REASON.txt", MAX_REASON_BYTES, errors="replace").strip()
        yield {"name": away.name, "state": "set aside", "reason": reason}


def check_usable(folder: Path, listed: Sequence[Mapping[str, Any]]) -> None:
    """NoCheckpointError if no checkpoint ``listed`` can be loaded; HpclmError if that is only because they cannot be read."""
    if any(row["state"] in USABLE for row in listed):
        return
    unreadable = [row["reason"] for row in listed if row["state"] == "unreadable"]
    if unreadable:
        raise HpclmError(f"checkpoints in {folder} cannot be read now: {unreadable[0]}")
    raise NoCheckpointError(f"no good checkpoint in {folder}")


def to_go_back(folder: Path, listed: Sequence[Mapping[str, Any]]) -> str:
    """The command that goes back to the newest healthy checkpoint; empty if the newest is healthy, or if none is."""
    usable = [row for row in listed if row["state"] in USABLE]
    healthy = [row for row in usable if row["healthy"]]
    if not healthy or usable[-1]["healthy"]:
        return ""
    return (
        f"to go back to the newest healthy one: hpclm resume {files.typed(folder.parent)} --from {healthy[-1]['step']}"
    )


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    row = {name: terminal.line(value) if isinstance(value, str) else value for name, value in row.items()}
    if "bytes" not in row:
        return f"{row['name']:<28}{row['state']:<11}{row['reason']}"
    parts = [f"{row['bytes'] / 1e6:,.1f} MB in {terminal.many(row['files'], 'file')}", f"{row['time']}", "imported"]
    if row["engine"]:
        parts[-1] = f"{row['engine']} on {terminal.many(row['processes'], 'process')}"
    if row["validation_loss"] is not None:
        parts.append(f"validation loss {row['validation_loss']:.4f}")
    if row["why"]:
        parts.append(f"saved on {row['why']}")
    parts += [row["health"], row["reason"]]
    return f"{row['name']:<28}{row['state']:<11}{'  '.join(part for part in parts if part)}"
