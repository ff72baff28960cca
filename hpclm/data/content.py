"""Content hashes of a dataset: computed while it is written, stored in PREFIX.json, verified when it is read.

A file is hashed in blocks of 1 MiB, each with 64-bit xxh3; the hash of the file is 128-bit xxh3 of the block hashes (8 bytes each,
big-endian). So corruption can be located, and blocks can be verified separately. PREFIX.json stores the hash of the index file, and for
the token file its hash and the hashes of its blocks.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpclm.base.errors import ConfigError
from hpclm.data.indexed import IndexedDataset, files, sidecar, whereabouts

HASH_BLOCK_BYTES = 1 << 20  # bytes
DIGEST = 16  # characters of a block's hash
KEY = "content"  # in PREFIX.json


@dataclass(frozen=True)
class DatasetContent:
    """Hashes of a dataset's files."""

    bin: str
    idx: str
    blocks: str
    """Hashes of the blocks of the tokens, concatenated."""
    added: str | None = None
    """Date of the hashing, if the dataset was written without hashes; earlier damage goes undetected."""

    def note(self) -> dict[str, Any]:
        """The entry in PREFIX.json."""
        hashes = {name: value for name, value in asdict(self).items() if value is not None}
        return {"hash": "xxh3", "block_bytes": HASH_BLOCK_BYTES, **hashes}

    def block(self, number: int) -> str:
        """The hash of a block of the tokens."""
        return self.blocks[DIGEST * number : DIGEST * (number + 1)]


def noted(prefix: str | Path) -> DatasetContent | None:
    """The hashes in PREFIX.json; None without any, ConfigError if they are invalid."""
    entry = sidecar(prefix).get(KEY)
    if entry is None:
        return None
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        content = DatasetContent(entry["bin"], entry["idx"], entry["blocks"], entry.get("added"))
        readable = (entry["hash"], entry["block_bytes"]) == ("xxh3", HASH_BLOCK_BYTES) and isinstance(content.idx, str)
        if readable and hash_of_blocks(content.blocks) == content.bin:
            return content
    raise ConfigError(
        f"the content hash in {files(prefix)[2]} is corrupt, or from another version of hpclm; restore that file, or record the "
        f"hash of the dataset as it is now: hpclm data verify --record {prefix}"
    )


def hash_of_blocks(blocks: str) -> str:
    """The hash of a file, from its concatenated block hashes."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(blocks))


def check_some(dataset: IndexedDataset, content: DatasetContent, count: int, rng: random.Random) -> int:
    """Verify ``count`` random blocks of the tokens, or all if there are fewer. Returns their number; ConfigError if one does not match."""
    total = len(content.blocks) // DIGEST
    tokens = HASH_BLOCK_BYTES // dataset.dtype.itemsize
    if total != -(-dataset.token_count // tokens):
        raise damaged(dataset, [], total)
    chosen = sorted(rng.sample(range(total), min(count, total)))
    wrong = [
        number
        for number in chosen
        if xxhash.xxh3_64_hexdigest(dataset.raw(number * tokens, min((number + 1) * tokens, dataset.token_count)))
        != content.block(number)
    ]
    dataset.release()
    if wrong:
        raise damaged(dataset, wrong, len(chosen))
    return len(chosen)


def differing(dataset: IndexedDataset, expected: DatasetContent, blocks: str) -> ConfigError:
    """The error for tokens with the block hashes ``blocks``."""
    count = max(len(blocks), len(expected.blocks)) // DIGEST
    return damaged(
        dataset, [n for n in range(count) if blocks[DIGEST * n : DIGEST * (n + 1)] != expected.block(n)], count
    )


def index_damaged(dataset: IndexedDataset) -> ConfigError:
    """The error for an index that does not match its hash."""
    return ConfigError(
        f"{dataset.idx_path} is corrupt: it does not match the content hash in {files(dataset.prefix)[2]}. Copy or create the "
        "dataset again"
    )


def damaged(dataset: IndexedDataset, wrong: Sequence[int], checked: int) -> ConfigError:
    """The error for the ``wrong`` blocks out of ``checked``."""
    if not wrong:
        return ConfigError(
            f"{dataset.bin_path} does not have the length that was hashed: it was replaced, or belongs to another dataset"
        )
    place = min(wrong[0] * HASH_BLOCK_BYTES // dataset.dtype.itemsize, max(0, dataset.token_count - 1))
    return ConfigError(
        f"{dataset.bin_path} is corrupt: {len(wrong)} of {checked} blocks of 1 MiB do not match the content hash in "
        f"{files(dataset.prefix)[2]}, the first one at {whereabouts(dataset, place)}. Copy or create the dataset again; if it was "
        f"changed on purpose: hpclm data verify --record {dataset.prefix}"
    )
