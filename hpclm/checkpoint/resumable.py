"""Check, before anything is written or queued, that a run can resume with these settings; reads manifests only."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm.checkpoint import directory
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.fingerprint import check_fingerprint, fingerprint
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.config import RunConfig
from hpclm.errors import ConfigError
from hpclm.rundir import submissions

if TYPE_CHECKING:
    from hpclm.data.sources import Source


Found = tuple[Path, Manifest]
"""The path of a checkpoint, and its manifest."""


def check(found: Found | None, config: RunConfig, source: "Source | None") -> None:
    """ConfigError if a run with these settings cannot resume from the checkpoint ``found``.

    Without ``source`` the data are not compared.
    """
    if found is None:
        return
    folder, manifest = found
    if config.checkpoint.resume == "never":
        raise ConfigError(
            f"{folder.parent} already holds {folder.name}, but checkpoint.resume=never; choose another out"
        )
    if manifest.fingerprint:  # imported checkpoints have none
        now = fingerprint(config, source)
        check_fingerprint(folder, {key: value for key, value in manifest.fingerprint.items() if key in now}, now)


def candidate(out: Path, step: int | None = None) -> Found | None:
    """The checkpoint that the next attempt in ``out`` resumes from: that of ``step`` or of a pending rollback, else the newest
    complete one (by file sizes); None if there is none.

    ConfigError if that step is missing or incomplete; HpclmError if the disk cannot be read.
    """
    folder = out / "checkpoints"
    wanted = submissions.rollback(out) if step is None else step
    there = directory.steps(folder) if out.is_dir() else []
    reasons = {}
    for path in reversed(there):
        if wanted is not None and path.name != f"step-{wanted:08d}":
            continue
        try:
            manifest = manifests.read(path)
            manifests.check_sizes(path, manifest)
        except BadCheckpoint as reason:
            reasons[path.name] = str(reason)
            continue
        except OSError as error:
            raise directory.unreadable(path, error) from error
        return path, manifest
    if wanted is not None:
        why = "".join(f"; {name} is bad: {reason}" for name, reason in reasons.items())
        asked = (
            ""
            if step is not None
            else f", which {out / submissions.ROLLBACK} asks for (remove it, or give --from STEP)"
        )
        raise ConfigError(
            f"{folder} has no complete checkpoint of step {wanted}{asked}; it has {listed(there)}{why}: hpclm checkpoints "
            f"{shlex.quote(str(out))} shows them"
        )
    return None


def listed(there: list[Path]) -> str:
    """A list of checkpoints by step, for messages."""
    numbers = [str(int(path.name[5:])) for path in there]
    return f"step{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else "none"
