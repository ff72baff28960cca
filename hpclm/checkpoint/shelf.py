"""The folder that checkpoints stand in: what is there, what was left half done, what is taken away and what set aside.

step-00001000 is a checkpoint, whole when it got its name. .tmp-* is being written, .old-* stands back for another of its
step, .trash-* is being removed, and .bad-* did not hold what its manifest says; nobody reads these.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpclm import files
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.errors import HpclmError, NoCheckpointError

log = logging.getLogger(__name__)


def names(folder: Path) -> list[str]:
    """What is in ``folder``, sorted; nothing where it is not there. HpclmError where that cannot be told."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError as error:
        if folder.is_symlink():
            raise HpclmError(f"{folder} is a link to what is not there; mount it, then start again") from error
        return []
    except OSError as error:  # which is not the same as nothing: a run must not start over because of it
        raise HpclmError(
            f"{folder} cannot be read now: {error.strerror}; look at the disk, then start again"
        ) from error


def steps(folder: Path) -> list[Path]:
    """Saved steps, oldest first; whole when they were saved, not verified."""
    found = [name for name in names(folder) if re.fullmatch(r"step-[0-9]+", name)]
    return [folder / name for name in sorted(found, key=lambda name: (int(name[5:]), name))]


def history(folder: Path) -> bool:
    """Whether a run has saved here, though nothing may be left of it: not even the folder."""
    known = any(name == "latest" or name.startswith(("step-", ".bad-")) for name in names(folder))
    return known or marker(folder).exists()


def marker(folder: Path) -> Path:
    """The file beside ``folder`` that says that something was saved in it once."""
    return folder.with_name(f"{folder.name}.saved")


def mark(folder: Path) -> None:
    """Leave the marker of ``folder``."""
    os.close(os.open(marker(folder), os.O_WRONLY | os.O_CREAT, 0o600))


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are as they were saved; BadCheckpoint, or HpclmError for a failing disk."""
    try:
        manifest = manifests.read(folder)
        manifests.verify(folder, manifest)
    except OSError as error:
        raise unreadable(folder, error) from error
    return manifest


def newest(folder: Path) -> tuple[Path, Manifest]:
    """The newest good checkpoint, nothing moved or loaded; NoCheckpointError when there is none."""
    for step in reversed(steps(folder)):
        try:
            return step, verified(step)
        except BadCheckpoint as reason:
            log.warning("checkpoint %s is bad: %s", step, reason)
    raise NoCheckpointError(f"no good checkpoint in {folder}; train first, with hpclm train")


def manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint that was found good; HpclmError where it cannot be read any more."""
    try:
        return manifests.read(folder)
    except (OSError, BadCheckpoint) as error:
        raise unreadable(folder, error) from error


def unreadable(folder: Path, error: object) -> HpclmError:
    """The error for files that are there and cannot be read."""
    return HpclmError(f"checkpoint {folder} cannot be read now: {error}; look at the disk, then start again")


def sweep(folder: Path, generation: int) -> None:
    """Remove what this attempt or an earlier one (``generation``) left half done.

    It loses its name first: who still writes it cannot publish it.
    """
    found = [folder / name for name in names(folder)]
    discard(draft for draft in found if draft.name.startswith(".tmp-") and _generation(draft) <= generation)
    for old in found:
        if old.name.startswith(".trash-"):
            _remove(old)
    with suppress(OSError):
        files.sweep(folder / "latest")


def discard(folders: Iterable[Path]) -> None:
    """Remove folders, each by a rename first, so that none is ever half there under its own name."""
    for old in folders:
        doomed = old.with_name(f".trash-{old.name.lstrip('.')}")
        _remove(doomed)
        try:
            old.rename(doomed)
        except FileNotFoundError:
            continue
        except OSError as error:  # one too many does no harm
            log.warning("%s could not be removed: %s", old, error)
            continue
        _remove(doomed)


def publish(draft: Path, final: Path) -> None:
    """Give a whole draft its final name, and have that on the disk. A checkpoint that has it stands back, and gets it again should this fail.

    A crash between the two renames is mended by ``restore``. Where the draft was swept, by a later attempt that has taken the
    run over, nothing of that attempt's is lost.
    """
    old = final.with_name(f".old-{final.name}")
    with suppress(FileNotFoundError):
        final.rename(old)
    try:
        draft.rename(final)
        try:
            files.sync(final.parent)
        except OSError:  # it may be gone after a power cut: then it does not count now either
            final.rename(draft)
            raise
    except OSError:
        restore(final.parent)
        raise
    discard([old])


def restore(folder: Path) -> None:
    """Give checkpoints that stand back their name again, where no other has it; the rest of them go."""
    for name in names(folder):
        old = folder / name
        if not name.startswith(".old-step-"):
            continue
        try:
            old.rename(old.with_name(old.name.removeprefix(".old-")))
        except FileNotFoundError:
            continue
        except OSError:  # another has the name
            discard([old])


def set_aside(folder: Path, reason: str) -> None:
    """Give a bad checkpoint a name that nobody reads, with the reason beside its files."""
    bad, number = folder.with_name(f".bad-{folder.name}"), 1
    while os.path.lexists(bad):
        bad, number = folder.with_name(f".bad-{folder.name}-{number}"), number + 1
    try:
        folder.rename(bad)
        with suppress(OSError):  # the log has it too
            if not bad.is_symlink():  # behind a link may be a good one
                (bad / "REASON.txt").write_text(reason + "\n", encoding="utf-8")
    except OSError as error:
        log.error("checkpoint %s is bad: %s. It could not be set aside: %s", folder, reason, error)
        return
    log.error("checkpoint %s is bad: %s. Set aside as %s", folder, reason, bad.name)


def _remove(folder: Path) -> None:
    """As far as it can be: what stays of it is nobody's, and the next sweep tries again."""
    with suppress(OSError):  # which rmtree passes on here and there
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _generation(draft: Path) -> int:
    """Which attempt writes ``draft``, by its name."""
    found = re.search(r"-g(\d+)$", draft.name)
    return int(found[1]) if found else 0
