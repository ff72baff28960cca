"""A cache of sample indices on disk: built once, memory-mapped by all processes, and never stale.

An entry is a folder named by the hash of its key, with a .npy file for each array, and about.json with the full key and the files' sizes
and fingerprints. An entry is written under a temporary name and renamed. If several processes build the same entry, even on different
machines, the first result is kept and the others use it. Anything in the folder may be deleted.
"""

import hashlib
import json
import logging
import mmap
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.base.files import aside, fingerprint, locked, read_text, reader, sweep, sync
from hpclm.data.scan import SharedFacts

FORMAT = 1  # version of entries, and of the way to build indices
NOTABLE = 1.0  # seconds to make an index, above which the log says so
Arrays = dict[str, NDArray[Any]]

log = logging.getLogger(__name__)


def kept(folder: Path, key: dict[str, Any], build: Callable[[], Arrays], facts: SharedFacts | None = None) -> Arrays:
    """The arrays that ``build`` creates for ``key`` (JSON: everything they depend on), from the cache in ``folder`` if possible.

    If the folder cannot be written, a warning is logged and the arrays stay in memory. Entries that another process of the node has
    verified, according to ``facts``, are only mapped.
    """
    entry, about = _entry(folder, key)
    name = f"index {entry}"
    verified = facts.values if facts else {}
    if name in verified:
        with suppress(OSError, ValueError, EOFError):  # removed since
            return _mapped(entry, verified[name])
    loaded = built = None
    try:
        loaded = _load(entry, about)
        if loaded is None:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(entry.with_suffix(".lock"), "another process is building the index; waiting for it"):
                loaded = _load(entry, about)  # built while this process waited
                if loaded is None:
                    sweep(entry)
                    began = time.perf_counter()
                    built = build()
                    seconds = time.perf_counter() - began
                    if seconds > NOTABLE:
                        log.info("made an index in %.1f s; it is kept in %s", seconds, folder)
                    _save(built, entry, about)
                    loaded = _load(entry, about)
    except OSError as error:
        log.warning("the index cannot be kept in %s (%s); it is rebuilt at every start", folder, error.strerror)
    if loaded:
        verified[name] = list(loaded)
    return loaded or built or build()


def stored(folder: Path, key: dict[str, Any]) -> Arrays | None:
    """The arrays for ``key`` in the cache; None without them. OSError if they cannot be read."""
    return _load(*_entry(folder, key))


def _entry(folder: Path, key: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The folder of an entry, and its full key."""
    about = {"format": FORMAT, **key}
    return folder / hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest(), about


def _load(entry: Path, about: dict[str, Any]) -> Arrays | None:
    """The arrays of an entry, memory-mapped; None if it is missing or incomplete."""
    try:
        written = json.loads(read_text(entry / "about.json"))
        if written.pop("files") != _fingerprints(entry) or written != about:
            raise ValueError("it does not match about.json")
        return _mapped(entry, sorted(path.stem for path in entry.glob("*.npy")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # a failing disk raises OSError
        log.warning("the index in %s is damaged (%s); it is rebuilt", entry, error)
        return None


def _mapped(entry: Path, names: Iterable[str]) -> Arrays:
    return {name: np.asarray(np.load(entry / f"{name}.npy", mmap_mode="r")) for name in names}


def _save(arrays: Arrays, entry: Path, about: dict[str, Any]) -> None:
    """Write an entry, unless another machine, which locks do not reach, was first."""
    written = aside(entry)
    written.mkdir()
    try:
        for name, array in arrays.items():
            np.save(written / f"{name}.npy", array)
        (written / "about.json").write_text(json.dumps({**about, "files": _fingerprints(written)}, indent=1), "utf-8")
        for path in written.iterdir():
            sync(path)
        if entry.exists() and _load(entry, about) is None:
            entry.rename(aside(entry))  # for ``sweep`` to remove later: another process may be reading it
        with suppress(OSError):
            written.rename(entry)
        sync(entry.parent)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _fingerprints(entry: Path) -> dict[str, list[Any]]:
    """Size and fingerprint of each array's file."""
    fingerprints: dict[str, list[Any]] = {}
    for path in sorted(entry.glob("*.npy")):
        with reader(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            fingerprints[path.name] = [len(content), fingerprint(content)]
    return fingerprints
