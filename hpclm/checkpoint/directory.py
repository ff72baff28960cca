"""The checkpoint directory of a run: list, publish, remove and set aside checkpoints.

step-00001000 is a checkpoint, complete when it got its name. Folders with other names are never read: .tmp-* is being written, .old-* is being
replaced by another checkpoint of its step, .trash-* is being removed, .bad-* did not match its manifest, and .rolled-back-* is newer
than the checkpoint to which the run was rolled back.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import REFUSED, ConfigError, HpclmError, NoCheckpointError
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest, check_sizes

log = logging.getLogger(__name__)


def names(folder: Path) -> list[str]:
    """The entries of ``folder``, sorted; empty if it does not exist. HpclmError if it cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError as error:
        if folder.is_symlink():
            raise HpclmError(f"{folder} is a link to a missing target; mount it, then start again") from error
        return []
    except OSError as error:  # not the same as empty: the run must not start from scratch because of it
        _refuse(folder, error)
        raise HpclmError(f"{folder} cannot be read now: {error.strerror}; check the disk, then start again") from error


def _refuse(path: Path, error: OSError) -> None:
    """ConfigError if ``error`` is the fault of the path, not of the disk."""
    if error.errno in REFUSED:
        wrong = f"{error.filename or path} cannot be read: {error.strerror}; check the path and its permissions"
        raise ConfigError(wrong) from None


def run_of(path: Path) -> Path:
    """The run directory of ``path``, which is a run directory or one of its checkpoints."""
    return path.absolute().parents[1] if (path / manifests.NAME).is_file() else path


def steps(folder: Path) -> list[Path]:
    """The checkpoints, oldest first. All were complete when saved; none is verified here."""
    checkpoints = [folder / name for name in names(folder) if re.fullmatch(r"step-[0-9]+", name)]
    return sorted(checkpoints, key=lambda path: (int(path.name[5:]), path.name))


def has_history(folder: Path) -> bool:
    """Whether a run has ever saved here, even if nothing is left, not even the directory."""
    left = any(name == "latest" or name.startswith(("step-", ".bad-", ".rolled-back-")) for name in names(folder))
    return left or marker(folder).exists()


def marker(folder: Path) -> Path:
    """The file next to ``folder`` that records that something was saved in it."""
    return folder.with_name(f"{folder.name}.saved")


def mark(folder: Path) -> None:
    """Create the marker of ``folder``."""
    os.close(files.appending(marker(folder), 0o600))


Check = Callable[[Path, Manifest], object]
"""Raises BadCheckpoint if the files do not match the manifest, OSError if the disk fails."""


def checked(folder: Path, check: Check = check_sizes) -> Manifest:
    """The manifest of a checkpoint after ``check``; BadCheckpoint, or HpclmError if it cannot be read."""
    try:
        manifest = manifests.read_manifest(folder)
        check(folder, manifest)
    except OSError as error:
        if not folder.exists():
            raise BadCheckpoint("it was removed") from None
        _refuse(folder, error)
        raise unreadable(folder, error) from error
    return manifest


def verified(folder: Path) -> Manifest:
    """Like checked(), but verifies every hash first."""
    from hpclm.checkpoint.format import verify  # imports PyTorch, which reading manifests does not need

    return checked(folder, verify)


def newest(folder: Path, look: Callable[[Path], Manifest] = verified) -> tuple[Path, Manifest]:
    """The newest good checkpoint; changes nothing on disk. NoCheckpointError without one.

    ``look``: returns the manifest of a checkpoint, or raises BadCheckpoint.
    """
    for step in reversed(steps(folder)):
        try:
            return step, look(step)
        except BadCheckpoint as reason:
            if not step.exists():  # a training run removed it, and has newer ones
                return newest(folder, look)
            log.warning("checkpoint %s is bad: %s", step, reason)
    raise NoCheckpointError(f"no good checkpoint in {folder}; train first, with hpclm train")


def locate(path: Path, look: Callable[[Path], Manifest] = verified) -> tuple[Path, Manifest]:
    """The checkpoint ``path``, or the newest good one of the run ``path``; NoCheckpointError without one."""
    if not (path / manifests.NAME).exists():
        return newest(path / "checkpoints", look)
    try:
        return path, look(path)
    except BadCheckpoint as reason:
        raise NoCheckpointError(f"checkpoint {path} is bad: {reason}; choose another") from None


def unreadable(folder: Path, error: object) -> HpclmError:
    """The error for a checkpoint that cannot be read, or that was removed meanwhile."""
    if not folder.exists():
        return HpclmError(
            f"checkpoint {folder} was removed while it was read: its run has newer ones; repeat the command"
        )
    return HpclmError(f"checkpoint {folder} cannot be read now: {error}; check the disk, then start again")


def none_left(folder: Path, reasons: Sequence[str]) -> str:
    """The message for a run that has saved before and cannot start from scratch."""
    return f"no good checkpoint in {folder} ({'; '.join(reasons)}); restore one, or start over with another out= and checkpoint.resume=auto"


def not_empty(checkpoint: Path) -> ConfigError:
    """The error for checkpoint.resume=never in a directory that already has ``checkpoint``."""
    return ConfigError(
        f"{checkpoint.parent} already holds {checkpoint.name}, but checkpoint.resume=never; choose another out"
    )


def sweep(folder: Path, generation: int) -> None:
    """Remove staging directories of this or earlier attempts (up to ``generation``).

    They are renamed first, so that a process that is still writing one cannot publish it.
    """
    entries = names(folder)
    discard(folder / name for name in entries if name.startswith(".tmp-") and _generation(name) <= generation)
    _remove([folder / name for name in entries if name.startswith(".trash-")])
    with suppress(OSError):
        files.sweep(folder / "latest")


def discard(folders: Iterable[Path]) -> None:
    """Remove directories, renaming each first, so that none is ever incomplete under its original name."""
    doomed = []
    for old in folders:
        try:
            doomed.append(_renamed(old, f".trash-{old.name.lstrip('.')}"))
        except FileNotFoundError:
            continue
        except OSError as error:  # an extra checkpoint does no harm
            log.warning("%s could not be removed: %s", old, error)
    _remove(doomed)


def publish(staging_dir: Path, final: Path) -> None:
    """Durably rename a staging directory to its final name. An existing checkpoint of that name is moved away first, and moved back on
    failure.

    ``restore`` repairs a crash between the two renames. If a later attempt has taken over and swept the staging directory, nothing of
    that attempt is lost.
    """
    old = final.with_name(f".old-{final.name}")
    with suppress(FileNotFoundError):
        final.rename(old)
    try:
        staging_dir.rename(final)
        try:
            # a rename is durable only once its directory is synced
            files.sync(final.parent)
        except OSError:  # the new name might not survive a power failure, so it must not count now either
            final.rename(staging_dir)
            raise
    except OSError:
        restore(final.parent)
        raise
    discard([old])


def restore(folder: Path) -> None:
    """Move replaced checkpoints (.old-*) back if their name is free; remove the others."""
    for name in names(folder):
        old = folder / name
        if not name.startswith(".old-step-"):
            continue
        try:
            old.rename(old.with_name(old.name.removeprefix(".old-")))
        except FileNotFoundError:
            continue
        except OSError:  # the name is taken
            discard([old])


def set_aside(folder: Path, reason: str) -> None:
    """Set a bad checkpoint aside under a name that is never read, with the reason next to its files."""
    try:
        name = put_away(folder, "bad", reason)
        log.error("checkpoint %s is bad: %s. Set aside as %s", folder, reason, name)
    except OSError as error:
        log.error("checkpoint %s is bad: %s. It could not be set aside: %s", folder, reason, error)


def put_away(folder: Path, kind: str, reason: str) -> str:
    """Rename a checkpoint to .KIND-step-…, with the reason next to its files; returns the new name. OSError if that fails."""
    away = _renamed(folder, f".{kind}-{folder.name}")
    with suppress(OSError):  # the log has the reason too
        if not away.is_symlink():  # a link may point to a good checkpoint
            files.overwrite(away / "REASON.txt", reason + "\n")
    return away.name


def _renamed(folder: Path, name: str) -> Path:
    """``folder`` under its new name, with a number if that is taken."""
    away = folder.with_name(name)
    number = 1
    while os.path.lexists(away):
        away = folder.with_name(f"{name}-{number}")
        number += 1
    return folder.rename(away)


def _remove(doomed: Sequence[Path]) -> None:
    """Remove as much as possible of renamed directories; the next sweep tries again.

    Their new names are made durable first: otherwise a power cut could restore an old name to a directory without some of its files.
    """
    try:
        if doomed:
            files.sync(doomed[0].parent)
    except OSError:
        return
    for folder in doomed:
        with suppress(OSError):  # rmtree raises some errors even with ignore_errors
            if folder.is_symlink() or folder.is_file():
                folder.unlink()
            else:
                shutil.rmtree(folder, ignore_errors=True)


def _generation(name: str) -> int:
    match = re.search(r"-g(\d+)$", name)
    return int(match[1]) if match else 0
