"""Check a run directory without writing to it, then create it with access for its owner only."""

import errno
import os
import re
import stat
from pathlib import Path

from hpclm.errors import MACHINE, ConfigError, unread, unwritten
from hpclm.folders import OTHERS, check_private, make_folder
from hpclm.rundir.runs import MARKS

FILES = (
    *("config.yaml", "jobs.jsonl", "attempts.jsonl", "ends.jsonl", "metrics.jsonl", "log.txt", "lock", "lock.beat"),
    *(
        "ranks.json",
        "preflight.json",
        "self-check.json",
        "corruption.jsonl",
        "hang.json",
        "checkpoints.saved",
        "rollback.json",
        "summary.json",
        "chat.json",
    ),
)
FOLDERS = ("checkpoints", "config-history", "logs", "job", "tensorboard")
TRUSTED = ("checkpoints", "logs", "job")  # created for their owner only, whatever the umask; may be links to elsewhere
KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a named pipe"}
BEFORE_A_RUN = re.compile(r"\..*|.*\.(out|err|log|sh|sbatch|slurm|ya?ml)|lost\+found|save-now|stop")
"""What may be in the folder of a new run: hidden files, what a job script puts or copies there, requests."""
CHOOSE = "or choose another out"


def check(out: Path) -> None:
    """ConfigError unless ``out`` is a folder that only this user can write to, or can be created."""
    try:
        mode = out.stat().st_mode
    except FileNotFoundError:
        _check_room(out, next(folder for folder in out.parents if folder.exists()))
        return
    except OSError as error:
        if error.errno in MACHINE:
            raise unread(error, f"run directory {out}") from None
        raise ConfigError(f"run directory {out}: {error.strerror} (errno {error.errno}); choose another out") from None
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"run directory {out} is a file; choose another out")
    check_private(out, "run directory")
    _check_room(out, out)
    check_inside(out)


def check_inside(out: Path) -> None:
    """ConfigError if a file or folder of a run in ``out`` has the wrong type, another owner, or can be written by others.

    Its folders may be links, to a disk with more space; its files may not, as a run would write through them.
    """
    mode = out.stat().st_mode if out.is_dir() else 0  # who cannot enter the folder cannot write its files
    reach = (stat.S_IWGRP if mode & stat.S_IXGRP else 0) | (stat.S_IWOTH if mode & stat.S_IXOTH else 0)
    problems = []
    for name in (*FILES, *FOLDERS):
        kind, path = stat.S_IFDIR if name in FOLDERS else stat.S_IFREG, out / name
        try:
            status = path.stat(follow_symlinks=kind == stat.S_IFDIR)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno in MACHINE:
                raise unread(error, path) from None
            problems.append(f"{path}: {error.strerror}; remove it, {CHOOSE}")
            continue
        mode, writable = stat.S_IMODE(status.st_mode), OTHERS if name in TRUSTED else reach
        if stat.S_IFMT(status.st_mode) != kind:
            is_a = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            problems.append(f"{path} is {is_a} and must be {KINDS[kind]}: a run writes there; move it away, {CHOOSE}")
        elif status.st_uid != os.geteuid():
            owner = f"belongs to another user (number {status.st_uid})"
            problems.append(f"{path} {owner}: a run trusts what is there; move it away, {CHOOSE}")
        elif mode & writable:
            others = f"can be written by others (mode {mode:04o})"
            problems.append(f"{path} {others}: a run trusts what is there; chmod go-w it, {CHOOSE}")
    if problems:
        raise ConfigError(problems)
    _check_unused(out)


def _check_unused(out: Path) -> None:
    """ConfigError if ``out`` has files, and no run: a run's files would get mixed up with them."""
    names = {path.name for path in out.iterdir()} if out.is_dir() and os.access(out, os.R_OK) else set()
    others = [name for name in sorted(names.difference(FILES, FOLDERS)) if not BEFORE_A_RUN.fullmatch(name)]
    if others and names.isdisjoint(MARKS):
        listed = ", ".join(others[:3]) + ", …" * (len(others) > 3)
        raise ConfigError(f"run directory {out} is not empty, and has no run: it has {listed}; choose another out")


def make(out: Path) -> None:
    """Create the run directory and the folders that a job needs before it starts."""
    try:
        for folder in (out, out / "job", out / "logs"):
            make_folder(folder, 0o700)
    except OSError as error:
        raise unwritten(error, out, "choose another out, or free some space") from None


def _check_room(out: Path, folder: Path) -> None:
    """ConfigError if nothing can be written in ``folder``, which is ``out`` or the folder it will be created in."""
    disk, number = os.statvfs(folder), 0
    if not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EROFS if disk.f_flag & os.ST_RDONLY else errno.EACCES
    elif disk.f_bavail == 0 or (disk.f_files and disk.f_favail == 0):  # some file systems count no files
        number = errno.ENOSPC
    if number:
        parent = "" if folder == out else f" in {folder}"
        raise ConfigError(
            f"run directory {out} cannot be written{parent}: {os.strerror(number)} (errno {number}); choose another out"
        )
