"""The contents of a manifest, and the validation of its fields. Needs no PyTorch.

The hash of a manifest shows that it has not changed, not that hpclm wrote it; so every field is validated too.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hpclm.checkpoint.parts import NUMBERED
from hpclm.config.engine import ENGINES
from hpclm.optim.health import Health
from hpclm.rundir.rows import count, duration, figure, maybe, sane, text, whole

DEEPEST = 32  # levels of nested mappings and lists
PROGRESS = {
    "step": whole,
    "samples": whole,
    "seconds": duration,
    "skipped": whole,
    "planned": maybe(whole),
    "health": lambda value: isinstance(value, dict),
}
SCALE = {"value": figure, "hysteresis": whole, "good_steps": whole}
TOKENIZER = {"kind": text, "size": whole, "eod": maybe(whole), "options": lambda value: isinstance(value, dict)}
HASHES = re.compile(r"([0-9a-f]{16})*")


@dataclass(frozen=True)
class Progress:
    """How far a run has trained: its only training state outside the engine."""

    step: int = 0
    samples: int = 0  # consumed
    seconds: float = 0.0  # of training, over all attempts
    skipped: int = 0  # steps that were skipped as not finite
    planned: int | None = None  # samples that the sample order was built for
    health: Health = field(default_factory=Health)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Progress":
        """Progress from a checkpoint."""
        return cls(**{**saved, "health": Health.of(saved.get("health"))})

    def after(self, samples: int, seconds: float, skipped: bool) -> "Progress":
        """Progress after one more step."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            seconds=self.seconds + seconds,
            skipped=self.skipped + skipped,
        )


class ChecksumMismatch(ValueError):
    """The contents of a file are not what was written."""


@dataclass(frozen=True)
class FileInfo:
    """Expected size and hashes of a checkpoint file."""

    size: int
    """Bytes."""
    xxh3: str
    """Hashes, 16 characters each: of the header with its length, then of every block of every tensor, in file order."""
    within: str | None = None
    """The node's file that it is a part of."""
    offset: int = 0
    """Where it begins in that, in bytes."""


def invalid(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The names of fields that are not as hpclm writes them."""
    checks = {
        "progress": _progress,
        "scalars": _scalars,
        "identity": _fingerprint,
        "tensors": _tensors,
        "files": _files,
        "made": lambda value: isinstance(value, dict) and not _deep(value),
        "validation": maybe(figure),
    }
    for name, value in manifest.items():
        if name not in checks or not checks[name](value):
            yield name
    made, scalars = manifest.get("made"), manifest.get("scalars")
    user_defined = isinstance(made, dict) and made.get("engine") not in (*ENGINES, None)  # may have no step count
    if isinstance(scalars, dict) and scalars and not user_defined and "optimizer_steps" not in scalars:
        yield "scalars"


def _progress(value: Any) -> bool:
    known = {each.name for each in fields(Progress)}
    return sane(value, PROGRESS, ["step"]) and value.keys() <= known


def _scalars(value: Any) -> bool:
    if not isinstance(value, dict) or _deep(value):
        return False
    scale = value.get("loss_scale")
    fits = scale is None or (sane(scale, SCALE, SCALE) and scale.keys() == SCALE.keys() and scale["value"] > 0)
    return fits and whole(value.get("optimizer_steps", 0))


def _fingerprint(value: Any) -> bool:
    if not isinstance(value, dict) or _deep(value) or not isinstance(value.get("data", {}), dict):
        return False
    tokenizer = value.get("data", {}).get("tokenizer")
    if tokenizer is None:
        return True
    hashes = tokenizer.get("files", {}) if isinstance(tokenizer, dict) else None
    return sane(tokenizer, TOKENIZER) and isinstance(hashes, dict) and all(map(text, hashes.values()))


def _tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_tensor, value.values()))


def _tensor(value: Any) -> bool:
    if not (isinstance(value, dict) and shape(value.get("shape")) and isinstance(value.get("parts"), list)):
        return False
    rank = len(value["shape"])
    return all(
        sane(part, PART, ["file", "start"])
        and len(part["start"]) == rank == len(part.get("size", part["start"]))
        and ("repeat" not in part or (rank > 0 and "size" in part and NUMBERED.fullmatch(part["file"])))
        for part in value["parts"]
    )


def _files(value: Any) -> bool:
    if not isinstance(value, dict) or not all(text(name) and isinstance(facts, dict) for name, facts in value.items()):
        return False
    return all(_file(facts) if "contains" not in facts else _node_file(facts) for facts in value.values())


def _file(facts: dict[str, Any]) -> bool:
    return sane(facts, FILE, FILE) and facts.keys() == FILE.keys()


def _node_file(facts: dict[str, Any]) -> bool:
    """Whether the files of a node's ranks follow each other without gaps."""
    contained, end = facts["contains"], 0
    if facts.keys() != {"size", "contains"} or not isinstance(contained, dict):
        return False
    for name, inner in contained.items():
        if not (text(name) and sane(inner, INNER, INNER) and inner.keys() == INNER.keys() and inner["offset"] == end):
            return False
        end += inner["size"]
    return bool(facts["size"] == end)


def _repeat(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(count, value))


def shape(value: Any) -> bool:
    """Whether ``value`` is a list of sizes or offsets along a few dimensions."""
    return isinstance(value, list) and len(value) <= DEEPEST and all(map(whole, value))


def _deep(value: Any, left: int = DEEPEST) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_deep(each, left - 1) for each in inner)


FILE = {"size": whole, "xxh3": lambda hashes: isinstance(hashes, str) and bool(HASHES.fullmatch(hashes))}
INNER = {**FILE, "offset": whole}
PART = {"file": text, "start": shape, "size": shape, "key": text, "repeat": _repeat}
