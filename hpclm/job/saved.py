"""Which checkpoint of a run is the newest complete one, by names and sizes: nothing is hashed, nothing large is loaded."""

import errno
import json
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm.job import rows

MANIFEST = "MANIFEST.json"
FILES = '\n "files": '
"""Where a manifest's list of files begins. What stands before it grows with tensors times processes, to many megabytes."""
END = 1 << 20  # bytes at the end of a manifest in which that is nearly always


def newest(folder: Path) -> tuple[int, float] | None:
    """Step of the newest complete checkpoint in ``folder``, and when it was made in seconds since 1970; None without one."""
    with suppress(OSError):
        found = [(int(path.name[5:]), path) for path in folder.iterdir() if re.fullmatch("step-[0-9]+", path.name)]
        for step, path in sorted(found, reverse=True):
            with suppress(OSError, ValueError, RecursionError):
                if complete(path):
                    return step, path.stat().st_mtime
    return None


def complete(folder: Path) -> bool:
    """Whether all files that a checkpoint's manifest lists are there and of the right size; OSError, ValueError without it."""
    listed = _listed(folder / MANIFEST)
    return bool(listed) and not any(fault(folder / name, size) for name, size in listed.items())


def fault(path: Path, size: int) -> str | None:
    """What is wrong with a file that must have ``size`` bytes, without reading it; OSError where the disk does not say."""
    try:
        found = path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            raise
        return f"{path.name} is not there"
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        return f"{path.name} has {found.st_size} bytes, not the {size} that were saved"
    return None


def _listed(path: Path) -> dict[str, int]:
    """Sizes of the files that a manifest lists, in bytes."""
    text = rows.tail(path, END)
    begin = text.rfind(FILES)
    files: Any
    if begin >= 0:
        files, _ = json.JSONDecoder().raw_decode(text, begin + len(FILES))
    else:
        content = json.loads(path.read_bytes() if path.is_file() else b"")
        files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(_listable(name, entry) for name, entry in files.items()):
        raise ValueError(f"{path} lists no files")
    return {name: entry["size"] for name, entry in files.items()}


def _listable(name: str, entry: Any) -> bool:
    return Path(name).name == name and rows.path(name) and rows.sane(entry, {"size": rows.whole}, ["size"])
