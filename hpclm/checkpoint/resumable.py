"""The checkpoint that a run resumes from. Resumability is checked from manifests alone, before anything is written or queued. A
rollback sets newer checkpoints aside; nothing is deleted.

A checkpoint becomes checkpoints/.rolled-back-step-00000040, and its lines of metrics.jsonl move to metrics.rolled-back-1.jsonl. Every
operation is idempotent, so the next attempt completes an interrupted rollback.
"""

import logging
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm.base import files
from hpclm.base.errors import ConfigError, NoCheckpointError
from hpclm.checkpoint import directory
from hpclm.checkpoint.fingerprint import check_fingerprint
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest, Progress
from hpclm.rundir import events, metrics_file

Candidate = tuple[Path, Manifest]
"""The path of a checkpoint, and its manifest."""
log = logging.getLogger(__name__)


def check_resumable(candidate: Candidate | None, policy: str, fingerprint: Mapping[str, Any]) -> None:
    """ConfigError if a run with this ``fingerprint`` cannot resume from ``candidate``; data missing in the fingerprint are not compared.

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
    """The checkpoint that the next attempt in ``out`` resumes from: that of ``step`` or of a pending rollback, otherwise the newest
    complete one (by file sizes); None without one.

    ConfigError if that step is missing or incomplete; HpclmError if the disk cannot be read.
    """
    folder = out / "checkpoints"
    required = events.rollback(out) if step is None else step
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
    if not (out / "checkpoints").is_dir():
        place = f"{out} has saved nothing" if step is None else f"{out} is not a run yet"
        raise ConfigError(
            f"{place}, so it has no checkpoint of step {required}; omit the step to start from the beginning"
        )
    asked = ", to which the run was asked to go back (choose another step)" if step is None else ""
    raise ConfigError(
        f"{folder} has no complete checkpoint of step {required}{asked}; it has {listed(saved)}{reasons}: hpclm checkpoints "
        f"{shlex.quote(str(out))} shows them"
    )


def progress(out: Path, step: int | None = None) -> Progress:
    """The starting progress of the next attempt in ``out``; see ``candidate``."""
    checkpoint = candidate(out, step)
    return Progress.of(checkpoint[1].progress) if checkpoint else Progress()


def check_fresh_start(folder: Path, policy: str) -> None:
    """NoCheckpointError if ``policy`` requires a checkpoint in ``folder``, and there is not even a bad one."""
    if any(re.match(r"(\.old-)?step-", name) for name in directory.names(folder)):
        return
    if policy == "require" or directory.has_history(folder):
        raise NoCheckpointError(directory.none_left(folder, ["the folder has no checkpoint"]))


def listed(saved: list[Path]) -> str:
    """A list of checkpoints by step, for messages."""
    numbers = [str(int(path.name[5:])) for path in saved]
    if not numbers:
        return "none"
    word = "step" if len(numbers) == 1 else "steps"
    return f"{word} {', '.join(numbers)}"


def roll_back(out: Path, step: int | None = None) -> int | None:
    """Set aside the checkpoints in the run directory ``out`` that are newer than ``step``, or than the step of a pending rollback; this
    process holds its lease. Returns that step, or None."""
    if step is not None:
        events.append(out, "roll back", step=step)
    step = events.rollback(out)
    if step is None:
        return None
    folder = out / "checkpoints"
    directory.restore(folder)  # otherwise a replaced checkpoint would reappear later
    saved = {int(path.name[5:]): path for path in directory.steps(folder)}
    if step not in saved:
        raise ConfigError(
            f"the run was asked to go back to step {step}, but {folder} has {listed([*saved.values()])}; choose another step"
        )
    for number in sorted(saved, reverse=True):
        if number > step:
            directory.put_away(saved[number], "rolled-back", f"a later start went back to step {step}")
    files.sync(folder)
    files.write_text(folder / "latest", saved[step].name + "\n")
    metrics_file.note_reached(out, step)
    with suppress(FileNotFoundError):
        metrics_file.move_after(out, step)
    events.append(out, "rolled back", step=step)
    newer = ", ".join(f"step {number}" for number in sorted(saved) if number > step) or "nothing, it is the newest"
    log.warning("rolling back to step %d as requested; set aside: %s", step, newer)
    return step
