"""Which tokenizer it is: what travels with a dataset and a checkpoint, and how two are told apart."""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpclm.data.tokenizers.interface import DEFAULTS, Options


def identity(kind: str, files: list[str], size: int, eod: int | None, options: Options) -> dict[str, Any]:
    """A tokenizer's ``identity``."""
    hashes: dict[str, str] = {}
    for file in files:
        name = Path(file).name
        while name in hashes:  # a/vocab and b/vocab
            name += "'"
        hashes[name] = hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    found: dict[str, Any] = {"kind": kind, "files": hashes, "size": size, "eod": eod}
    default = asdict(DEFAULTS)
    given = {name: value for name, value in asdict(options).items() if value != default[name]}
    return found | ({"options": given} if given else {})


def describe(identity: dict[str, Any]) -> str:
    """One short phrase: kind, files with the first 8 hex digits of their hashes, entries."""
    files = ", ".join(f"{name} {hash[:8]}" for name, hash in identity.get("files", {}).items())
    return f"{identity.get('kind')} tokenizer ({files + '; ' if files else ''}{identity.get('size')} entries)"


def mismatch(made_with: dict[str, Any], given: dict[str, Any]) -> str | None:
    """How two identities differ in what their ids mean, in a sentence that names both; None where they do not.

    The names of files do not matter.
    """
    hashes = [sorted(one.get("files", {}).values()) for one in (made_with, given)]
    differ = [
        f"{key} {made_with.get(key)} against {given.get(key)}"
        for key in ("kind", "size", "eod")
        if made_with.get(key) != given.get(key)
    ]
    if hashes[0] != hashes[1]:
        differ.append("the content of the files")
    if not differ:
        return None
    return f"made with the {describe(made_with)}, given the {describe(given)}; they differ in {', '.join(differ)}"
