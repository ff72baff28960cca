"""The newest complete checkpoint of a run, by names and sizes: nothing is hashed, nothing large is loaded."""

import errno
import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.rundir import rows

MANIFEST = "MANIFEST.json"
FILES = '\n "files": '
"""Where a manifest's list of files begins. The part before it can have many megabytes."""
_STEP = re.compile("step-[0-9]+")
LARGEST = 1 << 30  # bytes of a manifest
END = 1 << 20  # bytes at the end of a manifest in which that is nearly always


def survey(folder: Path | str, brief: bool = False) -> tuple[tuple[int, float] | None, int]:
    """The newest complete checkpoint in ``folder`` (its step, and when it was made in seconds since 1970; None without one), and
    how many were set aside as bad.

    ``brief``: a checkpoint counts that has a manifest. Looking at its files takes a request to each of a parallel file system's
    servers.
    """
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(folder)  # noqa: PTH208 - a tenth of the time
    bad = sum(name.startswith(".bad-") for name in names)
    for step, name in sorted(((int(n[5:]), n) for n in names if _STEP.fullmatch(n)), reverse=True):
        with suppress(OSError, ValueError, RecursionError):
            if (published if brief else complete)(f"{folder}/{name}"):
                return (step, os.stat(f"{folder}/{name}").st_mtime), bad  # noqa: PTH116 - a tenth of the time
    return None, bad


def published(folder: Path | str) -> bool:
    """Whether ``folder`` has a manifest: it is the last file of a checkpoint to be written."""
    return stat.S_ISREG(os.stat(f"{folder}/{MANIFEST}").st_mode)  # noqa: PTH116


def complete(folder: Path | str) -> bool:
    """Whether all files that the manifest lists exist with the right size; OSError or ValueError without a manifest."""
    listed = _listed(Path(folder, MANIFEST))
    return bool(listed) and not any(fault(Path(folder, name), size) for name, size in listed.items())


def fault(path: Path, size: int) -> str | None:
    """What is wrong with a file that must have ``size`` bytes, without reading it; OSError if the disk fails."""
    try:
        found = path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            raise
        return f"{path.name} is missing"
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        return f"{path.name} has {found.st_size} bytes, not the {size} that were saved"
    return None


def _listed(path: Path) -> dict[str, int]:
    """Sizes of the files that a manifest lists, in bytes."""
    text = rows.tail(path, END)
    begin = text.rfind(FILES)
    listed: Any
    if begin >= 0:
        listed, _ = json.JSONDecoder().raw_decode(text, begin + len(FILES))
    else:
        content = json.loads(files.read_bytes(path, LARGEST))
        listed = content.get("files") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(_listable(name, entry) for name, entry in listed.items()):
        raise ValueError(f"{path} lists no files")
    return {name: entry["size"] for name, entry in listed.items()}


def _listable(name: str, entry: Any) -> bool:
    return Path(name).name == name and rows.path(name) and rows.sane(entry, {"size": rows.whole}, ["size"])
