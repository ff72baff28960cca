"""What a checkpoint's folder must hold for it to count: MANIFEST.json, and files of the sizes and hashes it names."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpclm.errors import ConfigError

NAME = "MANIFEST.json"
SCHEMA = 1


class BadCheckpoint(Exception):
    """A folder that does not hold what its manifest says; the message is the reason."""


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint."""

    progress: dict[str, Any]
    scalars: dict[str, Any]  # the engine's state that is no tensor
    identity: dict[str, Any]  # what a run that goes on must find unchanged
    tensors: dict[str, dict[str, Any]]  # name -> shape of the whole, and parts: file and start of each
    files: dict[str, dict[str, Any]]  # name -> size in bytes, blake2b

    def write(self, folder: Path) -> Path:
        """Write the manifest into ``folder``."""
        path = folder / NAME
        content = {"schema": SCHEMA, **asdict(self)}
        path.write_text(json.dumps({**content, "blake2b": digest_of(content)}, indent=1), encoding="utf-8")
        return path


def read(folder: Path) -> Manifest:
    """The manifest in ``folder``, not yet held against the files; BadCheckpoint when it is no manifest."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if content.pop("blake2b") != digest_of(content):
            raise BadCheckpoint(f"{NAME} differs from what was saved (its hash is wrong)")
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ConfigError(
                f"{folder / NAME} has schema {schema}, and this hpclm reads {SCHEMA}; use the hpclm that wrote it"
            )
        manifest = Manifest(**content)
    except FileNotFoundError:
        raise BadCheckpoint(f"{NAME} is not there") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise BadCheckpoint(f"{NAME} cannot be read: {error}") from None
    named = {part["file"] for tensor in manifest.tensors.values() for part in tensor["parts"]}
    if not manifest.files or named - manifest.files.keys() or any(Path(name).name != name for name in manifest.files):
        raise BadCheckpoint(f"{NAME} names other files than it lists")
    return manifest


def digest_of(content: dict[str, Any]) -> str:
    """blake2b over the values of a manifest, whatever the white space around them."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, manifest: Manifest) -> None:
    """Hold every file against its size and hash; BadCheckpoint names the first that differs.

    A file that is there but cannot be read is no proof of damage: that OSError is the caller's.
    """
    for name, wanted in manifest.files.items():
        path = folder / name
        if not path.exists():
            raise BadCheckpoint(f"{name} is not there")
        size = path.stat().st_size
        if size != wanted["size"]:
            raise BadCheckpoint(f"{name} has {size} bytes, not the {wanted['size']} that were saved")
        if fingerprint(path) != wanted["blake2b"]:
            raise BadCheckpoint(f"{name} differs from what was saved (its hash is wrong)")


def fingerprint(path: Path) -> str:
    """blake2b of a file, in hex."""
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
