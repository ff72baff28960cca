"""A run directory before anything is in it: checked without a trace, then made, for its owner alone."""

import errno
import os
import stat
from pathlib import Path

from hpclm.errors import ConfigError, unwritten
from hpclm.job.runs import MARKS

FILES = (
    *("config.yaml", "jobs.jsonl", "attempts.jsonl", "ends.jsonl", "metrics.jsonl", "log.txt"),
    *("lock", "lock.beat", "ranks.json", "checkpoints.saved"),
)
FOLDERS = ("checkpoints", "logs", "job", "tensorboard")
KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe"}


def check(out: Path) -> None:
    """ConfigError unless ``out`` is a folder of this user's in which only he can write, or can be made."""
    try:
        found = out.stat()
    except FileNotFoundError:
        _makeable(out)
        return
    except OSError as error:
        raise ConfigError(f"run directory {out}: {error.strerror} (errno {error.errno}); choose another out") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"run directory {out} is a file; choose another out")
    if not any((out / mark).exists() for mark in MARKS) and out.resolve() in (Path("/"), Path.home(), Path.cwd()):
        raise ConfigError(f"run directory {out} is no place for a run's files; choose another out")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"run directory {out} belongs to another user (number {found.st_uid}); choose another out")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"run directory {out} can be written by others (mode {stat.S_IMODE(found.st_mode):o}), who could then run what "
            "they like in your name; chmod go-w it, or choose another out"
        )
    _check_room(out, out)
    check_kinds(out)


def check_kinds(out: Path) -> None:
    """ConfigError where a folder stands in ``out`` in the place of a file that a run writes, or a file in that of a folder."""
    wanted = {**dict.fromkeys(FILES, stat.S_IFREG), **dict.fromkeys(FOLDERS, stat.S_IFDIR)}
    problems = []
    for name, kind in wanted.items():
        try:
            found = stat.S_IFMT((out / name).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problems.append(f"{out / name}: {error.strerror}; remove it, or choose another out")
            continue
        if found != kind:
            problems.append(
                f"{out / name} is {KINDS.get(found, 'something else')} and must be {KINDS[kind]}: a run writes there; "
                "move it away, or choose another out"
            )
    if problems:
        raise ConfigError(problems)


def make(out: Path) -> None:
    """Make the run directory and the folders that a job needs before it starts."""
    try:
        out.mkdir(0o700, parents=True, exist_ok=True)
        for name in ("job", "logs"):
            (out / name).mkdir(0o700, exist_ok=True)
    except OSError as error:
        raise unwritten(error, out, "choose another out, or free this one") from None


def _makeable(out: Path) -> None:
    _check_room(out, next(folder for folder in out.parents if folder.exists()))


def _check_room(out: Path, folder: Path) -> None:
    """ConfigError where nothing can be written in ``folder``, which is ``out`` or the one that it will be made in."""
    disk, number = os.statvfs(folder), 0
    if not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EROFS if disk.f_flag & os.ST_RDONLY else errno.EACCES
    elif disk.f_bavail == 0 or (disk.f_files and disk.f_favail == 0):  # some file systems count no files
        number = errno.ENOSPC
    if number:
        where = "" if folder == out else f" in {folder}"
        raise ConfigError(
            f"run directory {out} cannot be written{where}: {os.strerror(number)} (errno {number}); choose another out"
        )
