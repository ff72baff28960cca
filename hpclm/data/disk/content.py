"""Content hashes of a dataset: computed while it is written, stored in PREFIX.json, verified when it is read.

A file is hashed in blocks of 1 MiB, each with 64-bit xxh3; the hash of the file is 128-bit xxh3 of the block hashes (8 bytes
each, big-endian). So corruption can be located, and blocks can be verified separately. PREFIX.json stores the file hash of the
index, and file and block hashes of the tokens.
"""

import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from hpclm.data.disk.indexed import IndexedDataset, files, sidecar, whereabouts
from hpclm.errors import ConfigError

BLOCK = 1 << 20  # bytes
DIGEST = 16  # characters of a block's hash
KEY = "content"  # in PREFIX.json
PAGE = 4096  # bytes; pages of zeros are what a file system leaves where data were lost


@dataclass(frozen=True)
class Content:
    """Hashes of a dataset's files."""

    bin: str
    idx: str
    blocks: str
    """Hashes of the blocks of the tokens, concatenated."""
    added: str | None = None
    """When they were added to a dataset that had been written without: what was damaged before is not detected."""

    def note(self) -> dict[str, Any]:
        """The entry in PREFIX.json."""
        return {
            "hash": "xxh3",
            "block_bytes": BLOCK,
            **{key: value for key, value in asdict(self).items() if value is not None},
        }

    def block(self, number: int) -> str:
        """The hash of a block of the tokens."""
        return self.blocks[DIGEST * number : DIGEST * (number + 1)]


class ZeroPages:
    """Counts the pages of a file that hold only zero bytes, while the file is passed from start to end."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        """Where the first one begins, in bytes."""
        self._place = 0

    def update(self, piece: memoryview) -> None:
        """Look at the next bytes; all pieces except for the last one must have whole pages."""
        data = np.frombuffer(piece, np.uint8)
        pages = data[: len(data) // PAGE * PAGE].view(np.uint64).reshape(-1, PAGE // 8)
        empty = np.flatnonzero(~pages.any(axis=1))
        if len(empty) and self.first is None:
            self.first = self._place + int(empty[0]) * PAGE
        self.count += len(empty)
        self._place += len(data)

    def told(self) -> str:
        """A warning; "" without such pages."""
        if not self.count:
            return ""
        return (
            f"warning: {self.count * PAGE:,} bytes of the tokens, from byte {self.first:,} on, are pages of zeros, as a crash or an "
            "interrupted copy leaves them; compare the file with its source"
        )


class Hasher:
    """Hashes a file that is passed from start to end in pieces of any size."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._block, self._room = xxhash.xxh3_64(), BLOCK

    def update(self, piece: Any) -> None:
        """Add the next bytes: anything with a contiguous buffer."""
        rest = memoryview(piece).cast("B")
        while len(rest):
            part, rest = rest[: self._room], rest[self._room :]
            self._block.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_block()

    def end(self) -> tuple[str, str]:
        """The hash of the file, and those of its blocks; call it last."""
        if self._room < BLOCK:
            self._end_block()
        blocks = "".join(self._blocks)
        return _over(blocks), blocks

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block, self._room = xxhash.xxh3_64(), BLOCK


class HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, file: IO[bytes]):
        self.file, self.hasher = file, Hasher()

    def write(self, piece: Any) -> None:
        """Append to the file."""
        self.hasher.update(piece)
        self.file.write(piece)


class Verification:
    """Verifies the tokens of a dataset against its hashes while they are read in order, and looks for pages of zeros."""

    def __init__(self, dataset: IndexedDataset):
        self.dataset, self.noted = dataset, noted(dataset.prefix)
        self.zeros = ZeroPages()
        self._hasher = Hasher() if self.noted else None

    def update(self, begin: int, end: int) -> None:
        """Hash the next tokens, ``flat[begin:end]``."""
        raw = self.dataset.raw(begin, end)
        self.zeros.update(raw)
        if self._hasher:
            self._hasher.update(raw)

    def end(self) -> None:
        """ConfigError if the hashes do not match."""
        if not (self._hasher and self.noted):
            return
        _, found = self._hasher.end()
        if found != self.noted.blocks:
            raise differing(self.dataset, self.noted, found)


def noted(prefix: str | Path) -> Content | None:
    """The hashes in PREFIX.json; None if there are none, ConfigError if they are invalid."""
    found = sidecar(prefix).get(KEY)
    if found is None:
        return None
    known = {"hash": "xxh3", "block_bytes": BLOCK}
    content = None
    if isinstance(found, dict) and all(found.get(name) == value for name, value in known.items()):
        texts = [found.get(name) for name in ("bin", "idx", "blocks")]
        added = found.get("added") if isinstance(found.get("added"), str) else None
        if all(isinstance(text, str) and re.fullmatch("[0-9a-f]*", text) for text in texts):
            content = Content(str(texts[0]), str(texts[1]), str(texts[2]), added)
    if content is None or len(content.blocks) % DIGEST or _over(content.blocks) != content.bin:
        raise ConfigError(
            f"the content hash in {files(prefix)[2]} is corrupt, or from another version of hpclm; restore that file, or hash the "
            f"dataset as it is now: hpclm data hash --overwrite {prefix}"
        )
    return content


def _over(blocks: str) -> str:
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(blocks))


class Recording:
    """Hashes the tokens of a dataset while they are read in order, and looks for pages of zeros."""

    def __init__(self, dataset: IndexedDataset):
        self.dataset, self.zeros, self._hasher = dataset, ZeroPages(), Hasher()

    def update(self, begin: int, end: int) -> None:
        """Hash the next tokens, ``flat[begin:end]``."""
        raw = self.dataset.raw(begin, end)
        self.zeros.update(raw)
        self._hasher.update(raw)

    def end(self) -> None:
        """There is nothing to compare with."""

    def content(self) -> Content:
        """The hashes of the dataset as it is now."""
        bin, blocks = self._hasher.end()
        return Content(bin, index_hash(self.dataset), blocks, time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def index_hash(dataset: IndexedDataset) -> str:
    """The hash of the index as it is now."""
    hasher = Hasher()
    hasher.update(dataset.raw_index())
    return hasher.end()[0]


def check_some(dataset: IndexedDataset, content: Content, count: int, rng: random.Random) -> int:
    """Verify ``count`` random blocks of the tokens, or all if there are fewer; how many. ConfigError if one does not match."""
    total = len(content.blocks) // DIGEST
    each = BLOCK // dataset.dtype.itemsize
    if total != -(-dataset.token_count // each):
        raise damaged(dataset, [], total)
    chosen = sorted(rng.sample(range(total), min(count, total)))
    wrong = [
        number
        for number in chosen
        if xxhash.xxh3_64_hexdigest(dataset.raw(number * each, min((number + 1) * each, dataset.token_count)))
        != content.block(number)
    ]
    dataset.release()
    if wrong:
        raise damaged(dataset, wrong, len(chosen))
    return len(chosen)


def differing(dataset: IndexedDataset, known: Content, found: str) -> ConfigError:
    """The error for tokens whose block hashes are ``found``."""
    count = max(len(found), len(known.blocks)) // DIGEST
    return damaged(dataset, [n for n in range(count) if found[DIGEST * n : DIGEST * (n + 1)] != known.block(n)], count)


def index_damaged(dataset: IndexedDataset) -> ConfigError:
    """The error for an index that does not match its hash."""
    return ConfigError(
        f"{dataset.idx_path} is corrupt: it does not match the content hash in {files(dataset.prefix)[2]}. Copy or create the "
        "dataset again"
    )


def damaged(dataset: IndexedDataset, wrong: Sequence[int], checked: int) -> ConfigError:
    """The error for tokens of which the blocks ``wrong``, out of ``checked``, do not match."""
    if not wrong:
        return ConfigError(
            f"{dataset.bin_path} does not have the length that was hashed: it was replaced, or belongs to another dataset"
        )
    place = min(wrong[0] * BLOCK // dataset.dtype.itemsize, max(0, dataset.token_count - 1))
    return ConfigError(
        f"{dataset.bin_path} is corrupt: {len(wrong)} of {checked} blocks of 1 MiB do not match the content hash in "
        f"{files(dataset.prefix)[2]}, the first one at {whereabouts(dataset, place)}. Copy or create the dataset again; if it was "
        f"changed on purpose: hpclm data hash --overwrite {dataset.prefix}"
    )
