"""Check, before anything is written or queued, that a run can resume with these settings; reads manifests only."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpclm.checkpoint import directory
from hpclm.checkpoint.fingerprint import check_fingerprint
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.errors import ConfigError, NoCheckpointError
from hpclm.rundir import submissions

Candidate = tuple[Path, Manifest]
"""The path of a checkpoint, and its manifest."""


def check_resumable(candidate: Candidate | None, policy: str, fingerprint: Mapping[str, Any]) -> None:
    """ConfigError if a run with this ``fingerprint`` cannot resume from ``candidate``; without its data they are not compared.

    ``policy``: checkpoint.resume.
    """
    if candidate is None:
        return
    folder, manifest = candidate
    if policy == "never":
        raise directory.not_empty(folder)
    if manifest.fingerprint:  # imported checkpoints have none
        saved = {key: value for key, value in manifest.fingerprint.items() if key in fingerprint}
        check_fingerprint(folder, saved, fingerprint)


def candidate(out: Path, step: int | None = None) -> Candidate | None:
    """The checkpoint that the next attempt in ``out`` resumes from: that of ``step`` or of a pending rollback, else the newest
    complete one (by file sizes); None if there is none.

    ConfigError if that step is missing or incomplete; HpclmError if the disk cannot be read.
    """
    folder = out / "checkpoints"
    required = submissions.rollback(out) if step is None else step
    saved = directory.steps(folder) if out.is_dir() else []
    reasons = ""
    for path in reversed(saved):
        if required is None or path.name == f"step-{required:08d}":
            try:
                return path, directory.checked(path)
            except BadCheckpoint as reason:
                reasons += f"; {path.name} is bad: {reason}"
    if required is None:
        return None
    asked = f", which {out / submissions.ROLLBACK} asks for (remove it, or give --from STEP)" if step is None else ""
    raise ConfigError(
        f"{folder} has no complete checkpoint of step {required}{asked}; it has {listed(saved)}{reasons}: hpclm checkpoints "
        f"{shlex.quote(str(out))} shows them"
    )


def check_fresh_start(folder: Path, policy: str) -> None:
    """NoCheckpointError if there must be a checkpoint in ``folder``, and there is none at all, not even a bad one."""
    if any(re.match(r"(\.old-)?step-", name) for name in directory.names(folder)):
        return
    if policy == "require" or directory.has_history(folder):
        raise NoCheckpointError(directory.none_left(folder, ["there is none"]))


def listed(saved: list[Path]) -> str:
    """A list of checkpoints by step, for messages."""
    numbers = [str(int(path.name[5:])) for path in saved]
    return f"step{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else "none"
