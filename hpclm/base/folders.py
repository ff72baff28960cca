"""Folders: writable ones, those that only this user can change, and temporary ones."""

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
    """``path`` as a writable folder, created with ``mode`` if necessary; ConfigError, which calls it ``what``, if that fails."""
    path = Path(path)
    try:
        make_folder(path, mode)
        probe = aside(path / ".writable")
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = "it is not a folder" if isinstance(error, FileExistsError) else f"{error.strerror} (errno {error.errno})"
        raise ConfigError(f"{what} {path} cannot be written: {why}; choose another place, or fix this one") from None
    return path


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode, parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # a folder that is writable, but not readable
            sync(folder.parent)


def exported_model(path: Path) -> str:
    """Advice for ``path``, given as a run directory, if it holds a model for other programs; else empty."""
    if path.suffix == ".gguf":
        return f"it is a model for llama.cpp, which hpclm writes and does not read; llama-cli -m {typed(path)} runs it"
    if (path / "config.json").is_file() and not (path / "config.yaml").exists():
        return f"it holds a model for transformers; to use it here, make a run of it: hpclm convert {typed(path)} runs/base"
    return ""


def private_folder(path: str | Path, what: str) -> Path:
    """``path`` as ``writable_folder``, created with mode 0700; ConfigError if another user owns it or can write to it."""
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
    """How another user could have written the file ``path`` with this ``status``; None if only this user and root could."""
    folders = dict.fromkeys([path.absolute().parent, Path(os.path.realpath(path)).parent])
    problems = (exposed_folder(folder, sticky=True) for folder in folders)
    return _exposed(f"{path}", status, OTHERS) or next(filter(None, problems), None)


def exposed_folder(folder: Path, sticky: bool = False) -> str | None:
    """How another user could create files in ``folder``; with ``sticky``, replace existing files, which a sticky folder such as
    /tmp prevents. None if only this user and root could."""
    status = folder.stat()
    return _exposed(f"folder {folder}", status, 0 if sticky and status.st_mode & stat.S_ISVTX else OTHERS)


def _exposed(name: str, status: os.stat_result, modes: int, trusted: Collection[int] = ()) -> str | None:
    if status.st_uid not in (trusted or (0, os.geteuid())):
        return f"{name} belongs to another user (number {status.st_uid})"
    if status.st_mode & modes:
        return f"{name} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}; chmod go-w)"
    return None


def own_temporary(name: str) -> Path:
    """The folder ``name`` of this user in TMPDIR or /tmp, which all processes on this machine share.

    If another user has made one of that name, a new one with a random name. ConfigError if others could replace either;
    OSError if it cannot be made.
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
    log.warning("%s was made by another user, or others can write to it: using a new folder instead", path)
    return Path(tempfile.mkdtemp(prefix=f"{name}-{_mine()}"))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in TMPDIR or /tmp during the block; ``sweep_temporary`` removes it if this process is killed. HpclmError if it
    cannot be made."""
    sweep_temporary()
    try:
        temporary = tempfile.TemporaryDirectory(prefix=f"hpclm-{_mine()}")
    except OSError as error:
        raise no_temporary(error) from None
    with temporary as folder:
        yield Path(folder)


def no_temporary(error: OSError) -> HpclmError:
    """The error where no folder for temporary files can be made."""
    return unwritten(error, "no temporary folder", "free space there, or set TMPDIR to another folder")


def sweep_temporary() -> None:
    """Remove the temporary folders of this user's processes on this machine that have ended without doing so."""
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
    """In the name of a temporary folder, the process that made it."""
    return f"{here()}-{os.getpid()}-"
