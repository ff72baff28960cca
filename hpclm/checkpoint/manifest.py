"""What a checkpoint's folder must hold for it to count: MANIFEST.json, and files of the sizes and hashes it names."""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpclm.checkpoint.format import Differs, Facts, File
from hpclm.errors import ConfigError
from hpclm.job import saved

NAME = saved.MANIFEST
SCHEMA = 3
LARGEST = 1 << 30  # bytes of a manifest


class BadCheckpoint(Exception):
    """A folder that does not hold what its manifest says; the message is the reason."""


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint."""

    progress: dict[str, Any]
    scalars: dict[str, Any]  # the engine's state that is no tensor
    identity: dict[str, Any]  # what a run that goes on must find unchanged
    tensors: dict[str, dict[str, Any]]  # name -> shape of the whole, and parts: file and start of each
    files: dict[str, dict[str, Any]]  # name -> its Facts
    made: dict[str, Any] = field(default_factory=dict)  # when and why, by which attempt, in which layout
    validation: float | None = None  # loss on held-out data at this step, where it was measured

    def write(self, folder: Path) -> Path:
        """Write the manifest into ``folder``; when this returns it is on the disk."""
        path = folder / NAME
        content = {"schema": SCHEMA, **asdict(self)}
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps({**content, "blake2b": digest_of(content)}, indent=1))
            file.flush()
            os.fsync(file.fileno())
        return path

    @property
    def why(self) -> str | None:
        """What told the run to leave, where it was saved because of that: a signal, stop; None for a regular save."""
        said = self.made.get("why")
        return said if isinstance(said, str) else None

    def facts(self, name: str) -> Facts:
        """What the file ``name`` must be."""
        return Facts(**self.files[name])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(int(entry["size"]) for entry in self.files.values())


def read(folder: Path) -> Manifest:
    """The manifest in ``folder``, not yet held against the files; BadCheckpoint when it is no manifest."""
    try:
        info = (folder / NAME).stat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > LARGEST:
            raise BadCheckpoint(f"{NAME} is no file, or too large for a manifest")
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if content.pop("blake2b") != digest_of(content):
            raise BadCheckpoint(f"{NAME} differs from what was saved (its hash is wrong)")
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ConfigError(
                f"{folder / NAME} has schema {schema}, and this hpclm reads {SCHEMA}; use the hpclm that wrote it"
            )
        manifest = Manifest(**content)
        for name in manifest.files:
            manifest.facts(name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise BadCheckpoint(f"{NAME} is not there") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadCheckpoint(f"{NAME} is a link to itself") from None
        raise
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise BadCheckpoint(f"{NAME} cannot be read: {error}") from None
    named = {part["file"] for tensor in manifest.tensors.values() for part in tensor["parts"]}
    if not manifest.files or named - manifest.files.keys() or any(Path(name).name != name for name in manifest.files):
        raise BadCheckpoint(f"{NAME} names other files than it lists")
    step = re.fullmatch(r"step-(\d+)", folder.name)
    if step and manifest.progress.get("step") != int(step[1]):
        raise BadCheckpoint(f"{NAME} is of step {manifest.progress.get('step')}, and the folder says {int(step[1])}")
    return manifest


def digest_of(content: dict[str, Any]) -> str:
    """blake2b over the values of a manifest, whatever the white space around them."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_sizes(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """BadCheckpoint where a file (one of ``names``; None: any) is missing or of another size."""
    for name in manifest.files if names is None else names:
        wrong = saved.fault(folder / name, manifest.files[name]["size"])
        if wrong:
            raise BadCheckpoint(wrong)


def verify(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """Read files (``names``; None: all), and hold them against their sizes and hashes; BadCheckpoint names the first that differs.

    A file that is there but cannot be read is no proof of damage: that OSError is the caller's.
    """
    check_sizes(folder, manifest, names)
    for name in manifest.files if names is None else names:
        try:
            with closing(File(folder / name, manifest.facts(name))) as file:
                file.check()
        except Differs as reason:
            raise BadCheckpoint(str(reason)) from None
