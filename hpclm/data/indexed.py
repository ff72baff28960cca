"""Megatron's ``.bin/.idx`` datasets: n token sequences in one flat file, and an index that says where each one lies.

Layout of ``.idx``, little-endian and unaligned, as NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py writes it:
magic (9 bytes), u64 version, u8 dtype code, u64 n, u64 d, i32 sizes[n], i64 pointers[n], i64 documents[d]; multimodal
datasets have i8 modes[n] after that, which hpclm does not read. ``.bin`` is the tokens, nothing else.
"""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.errors import ConfigError
from hpclm.files import readable

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}
BLOCK = 1 << 20  # sequences that the check of the pointers holds at a time
HASHED_WHOLE = 64 << 20  # bytes; of a longer index, and of the tokens, only the ends are hashed
END = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that Megatron stores the ids of ``vocab_size`` tokens in."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def files(prefix: str | Path) -> tuple[Path, Path, Path]:
    """Where the tokens, the index and the note about them lie: PREFIX.bin, PREFIX.idx, PREFIX.json."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), Path(f"{prefix}.json")


def sidecar(prefix: str | Path) -> dict[str, Any]:
    """What ``hpclm preprocess`` noted about the dataset; {} where there is no note, ConfigError where it is garbage."""
    path = files(prefix)[2]
    try:
        note = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"note {path} cannot be read: {error}; it belongs to the dataset: restore it, or remove it and set data.tokenizer"
        ) from None
    tokenizer = note.get("tokenizer") if isinstance(note, dict) else None
    wanted = {"kind": str, "size": int, "files": dict}
    sound = isinstance(tokenizer, dict) and all(isinstance(tokenizer.get(key), kind) for key, kind in wanted.items())
    if not sound:
        raise ConfigError(f"note {path} is not what hpclm preprocess writes; remove it and set data.tokenizer")
    return note


class IndexedDataset:
    """A dataset on disk, memory-mapped; ConfigError says what is wrong with its files.

    sizes [n] int32 and pointers [n] int64: tokens of each sequence, and its first byte in ``.bin``.
    documents [d] int64: document k is the sequences documents[k] up to documents[k + 1].
    flat [tokens]: all tokens in the order of the file.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path, _ = files(prefix)
        missing = [str(path) for path in (self.bin_path, self.idx_path) if not path.exists()]
        if missing:
            raise ConfigError(_not_there(self.prefix, missing))
        readable(self.idx_path, "index"), readable(self.bin_path, "token file")
        length = self.idx_path.stat().st_size
        with self.idx_path.open("rb") as file:
            head = file.read(HEADER.size)
        if head.startswith(MAGIC) and len(head) < HEADER.size:
            raise ConfigError(
                f"{self.idx_path} is cut short: {len(head)} bytes, and its header alone has {HEADER.size}"
            )
        if not head.startswith(MAGIC):
            raise ConfigError(f"{self.idx_path} is not a Megatron index: it does not start with {MAGIC!r}")
        _, version, code, n, d = HEADER.unpack(head)
        if version != VERSION:
            raise ConfigError(f"{self.idx_path} has format version {version}; hpclm reads version {VERSION}")
        if code not in DTYPES:
            known = {code: dtype.name for code, dtype in DTYPES.items()}
            raise ConfigError(f"{self.idx_path} has dtype code {code}; tokens are one of {known}")
        needed = HEADER.size + 12 * n + 8 * d
        if length not in (needed, needed + n):
            fairseq = "; it looks like fairseq's format, which hpclm does not read" if length == 26 + 12 * n else ""
            raise ConfigError(
                f"{self.idx_path} is {length} bytes long, but {n} sequences and {d} document bounds need {needed}"
                f"{fairseq or ': it is damaged, make or copy it again'}"
            )
        raw = np.memmap(self.idx_path, mode="r")
        self.dtype = DTYPES[code]
        self.sizes: NDArray[np.int32] = np.frombuffer(raw, "<i4", n, HEADER.size)
        self.pointers: NDArray[np.int64] = np.frombuffer(raw, "<i8", n, HEADER.size + 4 * n)
        self.documents: NDArray[np.int64] = np.frombuffer(raw, "<i8", d, HEADER.size + 12 * n)
        self._check()
        size = self.bin_path.stat().st_size
        self.flat = np.asarray(np.memmap(self.bin_path, self.dtype, "r")) if size else np.empty(0, self.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def tokens(self, i: int) -> NDArray:
        """Sequence ``i``, [sizes[i]], a view of the file."""
        begin = int(self.pointers[i]) // self.dtype.itemsize
        return self.flat[begin : begin + int(self.sizes[i])]

    def fingerprint(self) -> dict[str, Any]:
        """What changes when the dataset does, cheap to make: lengths of the files, type, and hashes (JSON)."""
        return {
            "bin_bytes": self.bin_path.stat().st_size,
            "idx_bytes": self.idx_path.stat().st_size,
            "dtype": self.dtype.name,
            "bin_ends": _hash(self.bin_path, 0),
            "idx": _hash(self.idx_path, HASHED_WHOLE),
        }

    def _check(self) -> None:
        width, end = self.dtype.itemsize, 0
        for start in range(0, len(self), BLOCK):
            sizes = self.sizes[start : start + BLOCK].astype(np.int64)
            if sizes.min() < 0:
                where = start + int(np.argmax(sizes < 0))
                raise ConfigError(f"{self.idx_path}: sequence {where} has a negative size, {self.sizes[where]}")
            expected = end + np.concatenate(([0], np.cumsum(sizes) * width))
            wrong = expected[:-1] != self.pointers[start : start + BLOCK]
            if wrong.any():
                where = int(np.argmax(wrong))
                raise ConfigError(
                    f"{self.idx_path}: sequence {start + where} should start at byte {expected[where]} of the tokens, "
                    f"where the one before ends, but the index says {self.pointers[start + where]}"
                )
            end = int(expected[-1])
        documents = self.documents
        ends = (int(documents[0]), int(documents[-1])) if len(documents) else None
        if ends != (0, len(self)):
            raise ConfigError(
                f"{self.idx_path}: document bounds must go from 0 to {len(self)}, the sequences; they go {ends}"
            )
        if (np.diff(documents) < 0).any():
            raise ConfigError(f"{self.idx_path}: document bounds must not decrease; it is damaged")
        size = self.bin_path.stat().st_size
        if size != end:
            raise ConfigError(
                f"{self.bin_path} is {size} bytes long, but {self.idx_path} describes {end}: "
                "one of them is cut short or belongs to another dataset"
            )


def _hash(path: Path, whole: int) -> str:
    """blake2b of the file up to ``whole`` bytes, or of both ends of a longer one."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= whole:
            digest.update(file.read())
        else:
            digest.update(file.read(END))
            file.seek(max(size - END, 0))
            digest.update(file.read())
    return digest.hexdigest()


def _not_there(prefix: Path, missing: list[str]) -> str:
    bin_path, idx_path, _ = files(prefix)
    folder = prefix.parent
    near = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx")) if folder.is_dir() else []
    hint = f"; {folder} has {', '.join(near[:5])}" if near else f"; no dataset lies in {folder.absolute()}"
    return f"a dataset is {bin_path} and {idx_path}, but {' and '.join(missing)} does not exist{hint}"
