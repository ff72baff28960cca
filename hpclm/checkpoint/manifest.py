"""MANIFEST.json: what a checkpoint consists of, with the size and hashes of every file."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.checkpoint import schema
from hpclm.checkpoint.parts import files_of, values
from hpclm.checkpoint.schema import ChecksumMismatch, FileInfo
from hpclm.errors import ConfigError
from hpclm.optim.health import Health
from hpclm.rundir import saved

NAME = saved.MANIFEST
SCHEMA = 4
READABLE = (3, SCHEMA, 5)  # 3 has neither sizes of parts nor repeated ones; 5 may have one file for the ranks of a node
LARGEST = 1 << 30  # bytes of a manifest


class BadCheckpoint(Exception):
    """A checkpoint that does not match its manifest; the message is the reason."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint."""

    progress: dict[str, Any]
    scalars: dict[str, Any]  # engine state other than tensors
    fingerprint: dict[str, Any]  # what must not change when the run is resumed; named identity in the file
    tensors: dict[str, dict[str, Any]]  # name -> shape of the whole tensor, and parts (hpclm.checkpoint.parts)
    files: dict[
        str, dict[str, Any]
    ]  # name -> FileInfo; in schema 5 of a node: size, and what it contains: name -> FileInfo
    made: dict[str, Any] = field(default_factory=dict)  # when and why it was saved, by which attempt, in which layout
    validation: float | None = None  # validation loss at this step, if measured

    def write(self, folder: Path) -> Path:
        """Write the manifest into ``folder``; it is on disk when this returns."""
        path = folder / NAME
        content = {"schema": SCHEMA, **asdict(self)}
        content["identity"] = content.pop("fingerprint")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(files.opened(path, flags, 0o644), "w", encoding="utf-8") as file:
            content["blake2b"] = digest_of(content)
            lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
            file.write(
                "{\n" + ",\n".join(lines) + "\n}\n"
            )  # a line each: the newest is found without reading the others
            file.flush()
            os.fsync(file.fileno())
        return path

    @property
    def fields(self) -> dict[str, Any]:
        """What makes this manifest up, for other processes (JSON): ``Manifest(**fields)`` is equal to it."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def why(self) -> str | None:
        """What made the run exit, if it was saved for that reason: a signal, stop; None for a regular save."""
        said = self.made.get("why")
        return said if isinstance(said, str) else None

    @property
    def health(self) -> Health:
        """Health of the run when this was saved."""
        return Health.of(self.progress.get("health"))

    @cached_property
    def infos(self) -> dict[str, FileInfo]:
        """Expected size and hashes of every rank's files, by name."""
        found = {}
        for name, facts in self.files.items():
            if "contains" not in facts:
                found[name] = FileInfo(**facts)
            for inner, its in facts.get("contains", {}).items():
                found[inner] = FileInfo(**its, within=name)
        return found

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(int(entry["size"]) for entry in self.files.values())


def read(folder: Path) -> Manifest:
    """The manifest in ``folder``, without checking the files; BadCheckpoint if it is not a valid manifest."""
    try:
        content = json.loads(files.read_text(folder / NAME, LARGEST))
        if not isinstance(content, dict):
            raise BadCheckpoint(f"{NAME} is not a JSON object")
        if content.pop("blake2b") != digest_of(content):
            raise BadCheckpoint(f"{NAME} differs from what was saved (its hash is wrong)")
        version = content.pop("schema")
        if version not in READABLE:
            raise ConfigError(
                f"{folder / NAME} has schema {version!r}, but this version of hpclm reads {', '.join(map(str, READABLE))}; "
                f"use the version that wrote it"
            )
        wrong = sorted(schema.invalid(content))
        if wrong:
            raise BadCheckpoint(f"{NAME} has invalid fields: {', '.join(wrong)}")
        manifest = Manifest(fingerprint=content.pop("identity"), **content)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise BadCheckpoint(f"{NAME} is missing") from None
    except files.Unfit as error:
        raise BadCheckpoint(f"{NAME}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadCheckpoint(f"{NAME} is a link to itself") from None
        raise
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise BadCheckpoint(f"{NAME} cannot be read: {error}") from None
    named = files_of((part for each in manifest.tensors.values() for part in each["parts"]), len(manifest.infos) + 1)
    if not manifest.infos or named - manifest.infos.keys() or any(Path(name).name != name for name in manifest.files):
        raise BadCheckpoint(f"{NAME} refers to files that it does not list")
    for name, entry in manifest.tensors.items():
        count, wanted = values(entry["parts"]), prod(entry["shape"])
        if count not in (wanted, None):
            raise BadCheckpoint(f"{NAME} lists {count} of the {wanted} values of {name}")
    step = re.fullmatch(r"step-(\d+)", folder.name)
    if step and manifest.progress.get("step") != int(step[1]):
        raise BadCheckpoint(
            f"{NAME} is of step {manifest.progress.get('step')}, but the folder is named after step {int(step[1])}"
        )
    return manifest


def digest_of(content: dict[str, Any]) -> str:
    """blake2b of the values of a manifest, independent of white space."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_sizes(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """BadCheckpoint if a file (one of ``names``; None: any) is missing or has another size."""
    for name in manifest.files if names is None else names:
        wrong = saved.fault(folder / name, manifest.files[name]["size"])
        if wrong:
            raise BadCheckpoint(wrong)


def verify(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> list[str]:
    """Read files (``names``; None: all) and verify their sizes and hashes; BadCheckpoint names the first mismatch.

    Returns the names of tensors with values that are not finite.

    A file that exists but cannot be read does not prove corruption: that OSError is left to the caller.
    """
    from hpclm.checkpoint.format import File  # imports PyTorch, which reading manifests does not need

    check_sizes(folder, manifest, names)
    found: list[str] = []
    for name, info in manifest.infos.items():
        if names is not None and (info.within or name) not in names:
            continue
        try:
            with closing(File(folder, name, info)) as file:
                found += file.check()
        except ChecksumMismatch as reason:
            raise BadCheckpoint(str(reason)) from None
    return found
