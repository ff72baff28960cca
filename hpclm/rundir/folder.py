"""The run directory: check its content without writing, create it with access for its owner only, find its checkpoints."""

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import MACHINE, ConfigError, unread, unwritten
from hpclm.base.folders import OTHERS, check_private, make_folder
from hpclm.rundir import events, metrics_file

FILES = (
    *("config.yaml", events.NAME, metrics_file.NAME, metrics_file.EXPERTS, "log.txt", "lock", "lock.beat"),
    *("self-check.json", "checkpoints.saved", "summary.json", "ledger.json"),
)
MARKS = ("config.yaml", events.NAME)
"""A run directory has at least one of these files."""
LASTING = (events.NAME, metrics_file.NAME, metrics_file.EXPERTS, "log.txt")
"""Files that grow line by line, and must survive a power cut."""
MANIFEST = "MANIFEST.json"
STEP = re.compile("step-[0-9]+")
FOLDERS = ("checkpoints", "config-history", "logs", "job", "tensorboard", "tokenizer")
TRUSTED = ("checkpoints", "logs", "job")  # created for their owner only, whatever the umask; may be links to elsewhere
KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a named pipe"}
BEFORE_A_RUN = re.compile(r"\..*|.*\.(out|err|log|sh|sbatch|slurm|ya?ml)|lost\+found|save-now|stop")
"""Names that may exist in the folder of a new run: hidden files, the files of job scripts, requests."""
CHOOSE = "choose another out"


def check_run_directory(out: Path) -> None:
    """ConfigError unless ``out`` is a folder that only this user can write to, or a folder that can be created."""
    try:
        mode = out.stat().st_mode
    except FileNotFoundError:
        _check_writable(out, next(folder for folder in out.parents if folder.exists()))
        return
    except OSError as error:
        if error.errno in MACHINE:
            raise unread(error, f"run directory {out}") from None
        raise ConfigError(f"run directory {out}: {error.strerror} (errno {error.errno}); {CHOOSE}") from None
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"run directory {out} is a file; {CHOOSE}")
    check_private(out, "run directory")
    _check_writable(out, out)
    check_inside(out)


def check_inside(out: Path) -> None:
    """ConfigError if a file or folder of a run in ``out`` has the wrong type or another owner, or others can write to it.

    Folders may be links, to a disk with more space. Files may not be links, because a run would write through them.
    """
    mode = out.stat().st_mode if out.is_dir() else 0
    reach = 0  # users who cannot enter the folder cannot write its files
    if mode & stat.S_IXGRP:
        reach |= stat.S_IWGRP
    if mode & stat.S_IXOTH:
        reach |= stat.S_IWOTH
    problems = []
    for name, kind in [*((name, stat.S_IFREG) for name in FILES), *((name, stat.S_IFDIR) for name in FOLDERS)]:
        path = out / name
        try:
            status = path.stat(follow_symlinks=kind == stat.S_IFDIR)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno in MACHINE:
                raise unread(error, path) from None
            problems.append(f"{path}: {error.strerror}; remove it, or {CHOOSE}")
            continue
        mode = stat.S_IMODE(status.st_mode)
        writable = OTHERS if name in TRUSTED else reach
        if stat.S_IFMT(status.st_mode) != kind:
            is_a = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            problems.append(
                f"{path} is {is_a} and must be {KINDS[kind]}: a run writes there; move it away, or {CHOOSE}"
            )
        elif status.st_uid != os.geteuid():
            owner = f"belongs to another user (number {status.st_uid})"
            problems.append(f"{path} {owner}: a run trusts its content; move it away, or {CHOOSE}")
        elif mode & writable:
            others = f"can be written by others (mode {mode:04o})"
            problems.append(f"{path} {others}: a run trusts its content; chmod go-w it, or {CHOOSE}")
    if problems:
        raise ConfigError(problems)
    _check_unused(out)


def _check_unused(out: Path) -> None:
    """ConfigError if ``out`` has other files and no run: a run's files would get mixed up with the others."""
    if not (out.is_dir() and os.access(out, os.R_OK)):
        return
    names = {path.name for path in out.iterdir()}
    others = [name for name in sorted(names.difference(FILES, FOLDERS)) if not BEFORE_A_RUN.fullmatch(name)]
    if others and names.isdisjoint(MARKS):
        listed = ", ".join(others[:3])
        if len(others) > 3:
            listed += ", …"
        raise ConfigError(f"run directory {out} is not empty, and has no run: it has {listed}; {CHOOSE}")


def make(out: Path) -> None:
    """Create the run directory and the folders that a job needs before it starts."""
    try:
        for folder in (out, out / "job", out / "logs"):
            make_folder(folder, 0o700)
    except OSError as error:
        raise unwritten(error, out, f"{CHOOSE}, or free some space") from None


def sync(out: Path) -> None:
    """fsync logs and metrics of the run in ``out``, before a checkpoint is published."""
    for name in LASTING:
        with suppress(FileNotFoundError):
            files.sync(out / name)
    files.sync(out)


def survey_checkpoints(folder: Path | str) -> tuple[tuple[int, float] | None, int]:
    """The step and time (seconds since 1970) of the newest checkpoint in ``folder``, or None; and the number set aside as bad."""
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(folder)  # noqa: PTH208 - a tenth of the time
    bad = sum(name.startswith(".bad-") for name in names)
    for step, name in sorted(((int(n[5:]), n) for n in names if STEP.fullmatch(n)), reverse=True):
        with suppress(OSError):
            manifest = os.stat(f"{folder}/{name}/{MANIFEST}")  # noqa: PTH116
            if stat.S_ISREG(manifest.st_mode):
                return (step, manifest.st_mtime), bad
    return None, bad


def unsaved(out: Path | str) -> str:
    """A few words on the steps that a run loses if it ends without saving."""
    newest, _ = survey_checkpoints(f"{out}/checkpoints")
    return f"not saved since step {newest[0]}" if newest else "nothing saved"


def _check_writable(out: Path, folder: Path) -> None:
    """ConfigError if this user must not write in ``folder``, which is ``out`` or will contain it."""
    if os.access(folder, os.W_OK | os.X_OK):
        return
    number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    parent = "" if folder == out else f" in {folder}"
    raise ConfigError(
        f"run directory {out} cannot be written{parent}: {os.strerror(number)} (errno {number}); {CHOOSE}"
    )
