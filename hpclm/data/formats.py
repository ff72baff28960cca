"""The layouts of ``.idx``, the index of the n token sequences in ``.bin``. All are little-endian and unaligned.

megatron  magic MMIDIDX, u64 version, u8 dtype code, u64 n, u64 d, i32 sizes[n], i64 pointers[n] (bytes), i64 documents[d];
          multimodal datasets have i8 modes[n] after that. (NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py)
fairseq   the same without d and documents: each sequence is a document. (facebookresearch/fairseq fairseq/data/indexed_dataset.py)

The length of a file distinguishes the layouts: for n sequences, fairseq's has 26 + 12 n bytes, and Megatron's at least 34 + 12 n.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError, unread
from hpclm.base.files import reader

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
FAIRSEQ_HEADER = struct.Struct("<9sQBQ")
OLD_MAGIC = b"TNTIDX\0\0"
VERSION = 1
_NAMES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
DTYPES = {code: np.dtype(name) for code, name in _NAMES.items()}
FAIRSEQ_ONLY = {9, 10}  # codes that Megatron does not have
FLOATS = {6: "float64", 7: "float32 in Megatron, float64 in fairseq"}

Layout = Literal["megatron", "fairseq"]


@dataclass(frozen=True, eq=False)
class IndexFile:
    """The contents of an index, as views of the file; only header and length have been checked."""

    layout: Layout
    dtype: np.dtype
    sizes: NDArray[np.int32]
    """[n] tokens in each sequence."""
    starts: NDArray[np.int64]
    """[n] start of each sequence in ``.bin``, in bytes."""
    documents: NDArray[np.int64] | None = None
    """[d] bounds of the documents in sequences; None: each sequence is a document."""
    modes: NDArray[np.int8] | None = None
    """[n] modes of multimodal datasets."""


def mapped(path: Path) -> tuple[mmap.mmap | bytes, int]:
    """A memory-mapped file (b"" if it is empty), and its modification time in ns."""
    with reader(path) as file:
        status = os.fstat(file.fileno())
        if not status.st_size:
            return b"", status.st_mtime_ns
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), status.st_mtime_ns
        except OSError as error:
            raise unread(error, path) from None
        except ValueError as error:
            raise ConfigError(f"{path} cannot be mapped into memory: {error}") from None


def read_index(path: Path, content: mmap.mmap | bytes) -> IndexFile:
    """The index in the file ``path``; ConfigError if its header is invalid or does not match its length."""
    head = content[: HEADER.size]
    if head.startswith(OLD_MAGIC):
        raise ConfigError(
            f"{path} has the old layout TNTIDX (--dataset-impl lazy or cached); convert it with the project that wrote it, or "
            "preprocess the text again"
        )
    if not head.startswith(MAGIC):
        raise ConfigError(
            f"{path} is not an index of tokens: it starts with {head[:9]!r}, not with {MAGIC!r}; is it another file, or a Git "
            "LFS pointer?"
        )
    _need(path, head, FAIRSEQ_HEADER.size)
    _, version, code, n = FAIRSEQ_HEADER.unpack_from(head)
    dtype = _dtype(path, version, code)
    length = len(content)
    fairseq = FAIRSEQ_HEADER.size + 12 * n
    if length == fairseq:
        sizes = np.frombuffer(content, "<i4", n, FAIRSEQ_HEADER.size)
        return IndexFile("fairseq", dtype, sizes, np.frombuffer(content, "<i8", n, FAIRSEQ_HEADER.size + 4 * n))
    _need(path, head, HEADER.size)
    d = HEADER.unpack_from(head)[-1]
    needed = HEADER.size + 12 * n + 8 * d
    if length not in (needed, needed + n):
        raise ConfigError(
            f"{path} is {length} bytes long, but {n} sequences and {d} document bounds need {needed} "
            f"({needed + n} with modes, {fairseq} in fairseq's layout): it is corrupt; create or copy it again"
        )
    at = HEADER.size
    modes = np.frombuffer(content, "i1", n, needed) if n and length > needed else None
    return IndexFile(
        "megatron",
        dtype,
        sizes=np.frombuffer(content, "<i4", n, at),
        starts=np.frombuffer(content, "<i8", n, at + 4 * n),
        documents=np.frombuffer(content, "<i8", d, at + 12 * n),
        modes=modes,
    )


def _need(path: Path, head: bytes, size: int) -> None:
    if len(head) < size:
        raise ConfigError(f"{path} is truncated: it has {len(head)} bytes, but its header needs {size}")


def _dtype(path: Path, version: int, code: int) -> np.dtype:
    if version != VERSION:
        raise ConfigError(f"{path} has format version {version}; hpclm reads version {VERSION}")
    if code in FLOATS:
        raise ConfigError(
            f"{path} has dtype code {code} ({FLOATS[code]}): it holds floating-point numbers, not token ids"
        )
    if code not in DTYPES:
        names = {code: dtype.name for code, dtype in DTYPES.items()}
        raise ConfigError(f"{path} has dtype code {code}; token ids need one of these codes: {names}")
    return DTYPES[code]
