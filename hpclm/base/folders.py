"""Folders that can be written, private folders, which only this user can change, and temporary folders."""

import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpclm.base.errors import ConfigError, HpclmError, unwritten
from hpclm.base.files import aside, here, sync, typed

log = logging.getLogger(__name__)
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def writable_folder(path: str | Path, what: str, mode: int = 0o777) -> Path:
    """``path`` as a writable folder, created with ``mode`` if necessary; ConfigError if that fails. ``what``: its name in the error."""
    path = Path(path)
    try:
        make_folder(path, mode)
        probe = aside(path / ".writable")
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = f"{error.strerror} (errno {error.errno})"
        if isinstance(error, FileExistsError):
            why = "it is not a folder"
        raise ConfigError(f"{what} {path} cannot be written: {why}; choose another place, or fix this one") from None
    return path


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode, parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # the parent may be writable, but not readable
            sync(folder.parent)


def exported_model(path: Path) -> str:
    """Advice if ``path``, given as a run directory, holds a model for other programs; otherwise empty."""
    if path.suffix == ".gguf":
        return f"it is a model for llama.cpp, which hpclm writes and does not read; llama-cli -m {typed(path)} runs it"
    if (path / "config.json").is_file() and not (path / "config.yaml").exists():
        return f"it holds a model for transformers; to use it here, make a run of it: hpclm convert {typed(path)} runs/base"
    return ""


def private_folder(path: str | Path, what: str) -> Path:
    """``writable_folder`` with mode 0700; ConfigError if another user owns the folder or can write to it."""
    check_private(path, what)
    path = writable_folder(path, what, mode=0o700)
    check_private(path, what)  # another user may have created it in the meantime
    return path


def check_private(path: str | Path, what: str) -> None:
    """ConfigError if the folder ``path`` exists and another user owns it or can write to it."""
    try:
        status = Path(path).stat()
    except OSError:  # reported when it is created
        return
    problem = _exposed(f"{what} {path}", status, OTHERS, trusted=(os.geteuid(),))
    if problem:
        raise ConfigError(f"{problem}: others could change files of the run there; choose another out")


def is_private_folder(path: Path) -> bool:
    """Whether ``path`` is a folder of this user, not a link, that nobody else can write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & OTHERS


def exposed(path: Path, status: os.stat_result) -> str | None:
    """A text on how another user could have written the file ``path`` with this ``status``; None if only this user and root could."""
    folders = dict.fromkeys([path.absolute().parent, Path(os.path.realpath(path)).parent])
    problems = (exposed_folder(folder, sticky=True) for folder in folders)
    return _exposed(f"{path}", status, OTHERS) or next(filter(None, problems), None)


def exposed_folder(folder: Path, sticky: bool = False) -> str | None:
    """A text on how another user could create files in ``folder``; None if only this user and root could.

    ``sticky``: ask about replacing existing files instead, which a sticky folder such as /tmp prevents.
    """
    status = folder.stat()
    protected = sticky and status.st_mode & stat.S_ISVTX
    return _exposed(f"folder {folder}", status, 0 if protected else OTHERS)


def _exposed(name: str, status: os.stat_result, modes: int, trusted: Collection[int] = ()) -> str | None:
    if status.st_uid not in (trusted or (0, os.geteuid())):
        return f"{name} belongs to another user (number {status.st_uid})"
    if status.st_mode & modes:
        return f"{name} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}; chmod go-w)"
    return None


def own_temporary(name: str) -> Path:
    """The folder ``name`` of this user in TMPDIR or /tmp, which all processes on this machine share.

    If another user has taken this name, a random suffix is added. ConfigError if others could replace the folder; OSError if it cannot be
    made.
    """
    parent = Path(tempfile.gettempdir())
    mode = parent.stat().st_mode
    if mode & OTHERS and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"compiled code is kept in {parent}, but others could replace it there (mode {stat.S_IMODE(mode):04o}); set TMPDIR "
            "to your own folder"
        )
    path = parent / f"{name}-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if is_private_folder(path):
        return path
    log.warning("%s was made by another user, or others can write to it; using a new folder instead", path)
    return Path(tempfile.mkdtemp(prefix=f"{name}-{_mine()}"))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in TMPDIR or /tmp during the block; a later process removes it if this one is killed. HpclmError if that fails."""
    sweep_temporary()
    try:
        temporary = tempfile.TemporaryDirectory(prefix=f"hpclm-{_mine()}")
    except OSError as error:
        raise no_temporary(error) from None
    with temporary as folder:
        yield Path(folder)


def no_temporary(error: OSError) -> HpclmError:
    """The error for a temporary folder that cannot be made."""
    return unwritten(error, "no temporary folder", "free space there, or set TMPDIR to another folder")


def sweep_temporary() -> None:
    """Remove the temporary folders that ended processes of this user have left on this machine."""
    if not Path("/proc/self").exists():
        return
    ours = re.compile(rf"hpclm-(?:[a-z]+-)?{re.escape(here())}-(\d+)-\w+")
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            owner = ours.fullmatch(entry.name)
            if owner is None or Path(f"/proc/{owner[1]}").exists():
                continue
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                shutil.rmtree(entry.path, ignore_errors=True)


def _mine() -> str:
    """The part of a temporary folder's name that identifies its process."""
    return f"{here()}-{os.getpid()}-"
