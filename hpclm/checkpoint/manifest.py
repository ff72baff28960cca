"""MANIFEST.json: the contents of a checkpoint, with the size and hashes of every file. Needs no PyTorch."""

import errno
import gc
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.config.plan import Position, Reading
from hpclm.optim.stability import Health
from hpclm.rundir import rows

NAME = "MANIFEST.json"
SCHEMA = 4
MAX_MANIFEST_BYTES = 1 << 30
USUAL = 1 << 24  # bytes; a larger file is examined before it is read
TAIL = 1 << 10
END = re.compile(rb'"blake2b": *"[0-9a-f]{128}"\s*\}\s*$')
NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}  # other errors are the disk's
PROGRESS: dict[str, rows.Kind] = {"step": int, "samples": int, "seconds": float, "skipped": int, "planned": int}
PLAIN = re.compile(r"[\w-][\w.-]*")  # a file name in the checkpoint's own folder


class BadCheckpoint(Exception):
    """A checkpoint that differs from what was saved; the message is the reason."""


@dataclass(frozen=True)
class FileInfo:
    """Expected size and hashes of one rank's file."""

    size: int
    """Bytes."""
    xxh3: str
    """Hashes, 16 characters each: of the header with its length, then of every block of every tensor, in file order."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint."""

    progress: dict[str, Any]
    scalars: dict[str, Any]  # engine state other than tensors
    fingerprint: dict[str, Any]  # what must not change when the run is resumed; named identity in the file
    tensors: dict[str, dict[str, Any]]  # name -> shape of the whole tensor; parts: file, start, size, key in that file
    files: dict[str, dict[str, Any]]  # name -> FileInfo
    made: dict[str, Any] = field(
        default_factory=dict
    )  # time, reason and attempt of the save, and the layout of processes
    validation: float | None = None  # validation loss at this step, if measured

    def write(self, folder: Path) -> Path:
        """Write the manifest into ``folder``; it is on disk when this returns."""
        path = folder / NAME
        content = {"schema": SCHEMA, **self.fields}
        content["identity"] = content.pop("fingerprint")
        content["blake2b"] = digest_of(content)
        lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(files.opened(path, flags, 0o644), "w", encoding="utf-8") as file:
            file.write("{\n" + ",\n".join(lines) + "\n}\n")
            file.flush()
            os.fsync(file.fileno())
        return path

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of this manifest for other processes (JSON): ``Manifest(**fields)`` is equal to it."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def averaged(self) -> "Manifest":
        """This checkpoint with the average of its weights (optim.ema) in place of the weights; ConfigError without one."""
        averages = {
            f"model.{name.removeprefix('ema.')}": {
                **entry,
                "parts": [{**part, "key": part.get("key", name)} for part in entry["parts"]],
            }
            for name, entry in self.tensors.items()
            if name.startswith("ema.")
        }
        if not averages:
            raise ConfigError(
                f"the checkpoint of step {self.progress['step']} has no average of the weights (--ema): its run was trained without optim.ema"
            )
        return replace(self, tensors=self.tensors | averages)

    @property
    def why(self) -> str | None:
        """The reason (a signal, stop) if this was saved because the run had to exit; None for a regular save."""
        why: str | None = self.made.get("why")
        return why

    @property
    def health(self) -> Health:
        """Health of the run at the time of the save."""
        return Health.of(self.progress.get("health"))

    @cached_property
    def infos(self) -> dict[str, FileInfo]:
        """Expected size and hashes of every rank's file, by name."""
        return {name: FileInfo(**entry) for name, entry in self.files.items()}

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(entry["size"] for entry in self.files.values())


@contextmanager
def many_objects() -> Iterator[None]:
    """Disable the garbage collector while a block creates a million live objects, such as the manifest of 512 ranks. Otherwise
    repeated scans of them take most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``; reads no other file. BadCheckpoint if it is not valid, OSError if the disk fails."""
    try:
        with many_objects():
            return _parsed(_content(folder / NAME), folder)
    except OSError as error:
        if isinstance(error, files.Unfit) or error.errno in NO_FILE:
            raise BadCheckpoint(f"{NAME}: {error.strerror}") from None
        raise
    except ConfigError:  # a subclass of ValueError
        raise
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"{NAME} cannot be read: {error}") from None


def _content(path: Path) -> str:
    """The text of a manifest; ValueError for a large file that cannot be a manifest, before much of it is in memory."""
    with files.reader(path) as file, files.naming(path):
        size = files.check_size(file, path, MAX_MANIFEST_BYTES).st_size
        if size > USUAL:
            file.seek(-TAIL, os.SEEK_END)
            if END.search(file.read()) is None:
                raise ValueError("its end is not that of a manifest")
            file.seek(0)
            while block := file.read(USUAL):
                if b"\0" in block:
                    raise ValueError("it has bytes that are not text")
            file.seek(0)
        return file.read(MAX_MANIFEST_BYTES + 1).decode()


def _parsed(text: str, folder: Path) -> Manifest:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{NAME} is not a JSON object")
    if content.pop("blake2b") != digest_of(content):
        raise BadCheckpoint(f"{NAME} differs from what was saved (its hash is wrong)")
    version = content.pop("schema")
    if version != SCHEMA:
        raise ConfigError(
            f"{folder / NAME} has schema {version!r}, but this version of hpclm reads {SCHEMA}; use the version that wrote it"
        )
    manifest = Manifest(fingerprint=content.pop("identity"), **content)
    _check(manifest, folder)
    return manifest


def _check(manifest: Manifest, folder: Path) -> None:
    """BadCheckpoint unless all files are in ``folder``, the parts of every tensor form a whole, and the folder has the step's name.

    The hash only proves that the manifest has not changed since somebody wrote it.
    """
    infos = manifest.infos
    if not infos or not all(map(PLAIN.fullmatch, infos)):
        raise BadCheckpoint(f"{NAME} lists no files, or files elsewhere")
    for name, entry in manifest.tensors.items():
        if any(part["file"] not in infos for part in entry["parts"]):
            raise BadCheckpoint(f"{NAME} refers to files that it does not list")
        sizes = [part["size"] for part in entry["parts"]]
        count = sum(map(prod, sizes))
        whole = prod(entry["shape"])
        if count != whole:
            raise BadCheckpoint(f"{NAME} lists {count} of the {whole} values of {name}")
        starts = [tuple(part["start"]) for part in entry["parts"] if prod(part["size"])]
        if len(set(starts)) != len(starts):  # if one is there twice, another is missing
            raise BadCheckpoint(f"{NAME} lists values of {name} more than once")
    if not isinstance(manifest.scalars, dict):
        raise BadCheckpoint(f"{NAME} has no scalars object")
    for name, kind in PROGRESS.items():
        value = manifest.progress.get(name)
        if not rows.fits(value, kind) or (value is None and name != "planned"):
            raise BadCheckpoint(f"{NAME} has progress.{name}={value!r:.60}, which is not a valid value")
    step = Progress.of(manifest.progress).step
    named = re.fullmatch(r"step-(\d+)", folder.name)
    if named and step != int(named[1]):
        raise BadCheckpoint(f"{NAME} is of step {step}, but the folder is named after step {int(named[1])}")


def digest_of(content: dict[str, Any]) -> str:
    """blake2b of the values of a manifest, independent of white space."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_sizes(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """BadCheckpoint if a file (one of ``names``; None: any) is missing or has another size; OSError if the disk fails."""
    for name in manifest.files if names is None else names:
        size = manifest.files[name]["size"]
        try:
            status = (folder / name).stat()
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            raise BadCheckpoint(f"{name} is missing") from None
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise BadCheckpoint(f"{name} has {status.st_size} bytes, not the {size} that were saved")


@dataclass(frozen=True)
class Progress:
    """Progress of a run's training: the only training state outside the engine."""

    step: int = 0
    samples: int = 0  # consumed
    seconds: float = 0.0  # of training, over all attempts
    skipped: int = 0  # steps that were skipped as not finite
    planned: int | None = None  # samples that the sample order was built for
    health: Health = field(default_factory=Health)
    phases: tuple[Reading, ...] = ()
    """How far the run had read at the beginning of each phase that it has read from; empty unless data.order=per_dataset."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Progress":
        """Progress from a checkpoint."""
        phases = tuple(Reading(**entry) for entry in saved.get("phases", ()))
        return cls(**{**saved, "health": Health.of(saved.get("health")), "phases": phases})

    @property
    def position(self) -> Position:
        """Where the run has got to in its data."""
        return Position(self.step, self.samples, self.phases)
