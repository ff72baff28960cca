"""Write safetensors files with a hash for every block, and read them block by block, verifying each.

The format is that of the safetensors library: the length of the header (8 bytes, little endian), the header (JSON: name -> dtype, shape,
data_offsets), then the values. It is implemented here because the library cannot hash while it writes, and reads through a memory map,
which kills the process if the disk fails.
"""

import json
import os
import struct
from collections.abc import Collection, Sequence
from contextlib import closing
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from hpclm.base import files
from hpclm.checkpoint.manifest import BadCheckpoint, FileInfo, Manifest, check_sizes

NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
TYPES = {name: dtype for dtype, name in NAMES.items()}
MAX_HEADER_BYTES = 1 << 28
HASH_BLOCK_BYTES = 1 << 22  # bytes of a tensor that share a hash
DIGEST = 16  # characters of a hash: xxh3 of 64 bits, in hex


Named = Sequence[tuple[str, Tensor]]


def header(tensors: Named) -> bytes:
    """The header of a file with named tensors, including its length."""
    entries = {}
    end = 0
    for name, tensor in tensors:
        begin = end
        end += tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned
    return struct.pack("<Q", len(text)) + text


def write(path: Path, tensors: Named) -> FileInfo:
    """Write named tensors to a new file; they are on disk when this returns. OSError if that fails."""
    text = header(tensors)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        digests = [_put(handle, memoryview(text))]
        size = len(text)
        for _, tensor in tensors:
            content = memory(tensor.detach().cpu().contiguous())
            size += len(content)
            digests += [
                _put(handle, content[begin : begin + HASH_BLOCK_BYTES])
                for begin in range(0, len(content), HASH_BLOCK_BYTES)
            ]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileInfo(size, "".join(digests))


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _put(handle: int, block: memoryview) -> str:
    digest = xxhash.xxh3_64_hexdigest(block)
    while len(block):
        block = block[os.write(handle, block) :]
    return digest


def _entries(name: str, text: bytes, room: int) -> dict[str, dict[str, Any]]:
    """The entries of a header; BadCheckpoint unless they describe contiguous tensors of ``room`` bytes in total."""
    try:
        entries: dict[str, dict[str, Any]] = json.loads(text)
        end = 0
        for entry in entries.values():
            begin = end
            end += prod(entry["shape"]) * TYPES[entry["dtype"]].itemsize
            if entry["data_offsets"] != [begin, end]:
                raise ValueError(f"offsets {entry['data_offsets']} instead of {[begin, end]}")
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"{name} has an invalid header: {error}") from None
    if end != room:
        raise BadCheckpoint(f"{name} has {room} bytes of values, but its header describes {end}")
    return entries


def _finite(block: memoryview, dtype: torch.dtype) -> bool:
    """Whether all values of a block are finite."""
    if not dtype.is_floating_point:
        return True
    values = torch.frombuffer(block, dtype=dtype)
    return bool(values.sum().isfinite() or values.isfinite().all())  # a sum is fast, but may overflow


def verify(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> list[str]:
    """Read the files ``names`` (None: all) and verify their sizes and hashes. BadCheckpoint names the first mismatch; OSError means a
    failing disk. Returns the names of tensors with values that are not finite."""
    check_sizes(folder, manifest, names)
    not_finite: list[str] = []
    for name, info in manifest.infos.items():
        if names is None or name in names:
            with closing(File(folder, name, info)) as file:
                not_finite += file.check()
    return not_finite


class File:
    """A file written by ``write``, open for reading; raises BadCheckpoint as soon as a mismatch is found."""

    def __init__(self, folder: Path, name: str, info: FileInfo):
        """``name``: the file's name in the manifest."""
        self.path = folder / name
        self._name = name
        self._digests = info.xxh3
        self._handle: int | None = None
        try:
            length = self._read(0, 8)
            begin = 8 + struct.unpack("<Q", length)[0]
            if begin > min(info.size, MAX_HEADER_BYTES):
                raise self._differs()
            text = self._read(8, begin - 8)
            self._verify(memoryview(length + text), 0)
            self._entries = _entries(self._name, text, info.size - begin)
        except BaseException:
            self.close()
            raise
        self._begin = begin
        blocks = [-(-self._size(name) // HASH_BLOCK_BYTES) for name in self._entries]
        self._first = dict(zip(self._entries, accumulate(blocks, initial=1), strict=False))
        """Index of the hash of each tensor's first block."""

    def close(self) -> None:
        """Close the file; it is reopened on the next read."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def check(self) -> list[str]:
        """Read and verify the whole file; returns the names of tensors with values that are not finite."""
        scratch = memoryview(bytearray(HASH_BLOCK_BYTES))
        not_finite = []
        for name, entry in self._entries.items():
            blocks = (self._block(name, begin, scratch) for begin in range(0, self._size(name), HASH_BLOCK_BYTES))
            if not all([_finite(block, TYPES[entry["dtype"]]) for block in blocks]):  # reads every block
                not_finite.append(name)
        return not_finite

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; BadCheckpoint if the file has no tensor of that name."""
        if name not in self._entries:
            raise BadCheckpoint(f"{self._name} has no tensor {name}, although the manifest lists it")
        return tuple(self._entries[name]["shape"])

    def values(self, name: str, low: Sequence[int], high: Sequence[int]) -> Tensor:
        """Values from ``low`` up to but excluding ``high``. Reads the hash blocks that contain these rows (first dimension)."""
        shape = self.shape(name)
        dtype = TYPES[self._entries[name]["dtype"]]
        if not shape:
            low = (0,)
            high = (1,)
            shape = (1,)
        row = prod(shape[1:]) * dtype.itemsize
        rows = torch.empty((high[0] - low[0], *shape[1:]), dtype=dtype)
        self._read_tensor(name, low[0] * row, memory(rows))
        inside = (slice(None), *(slice(a, b) for a, b in zip(low[1:], high[1:], strict=True)))
        return rows[inside] if self.shape(name) else rows[0]

    def _read_tensor(self, name: str, begin: int, target: memoryview) -> None:
        """Read the bytes of a tensor from ``begin`` on into ``target``."""
        end = begin + len(target)
        scratch: memoryview | None = None
        for first in range(begin - begin % HASH_BLOCK_BYTES, end, HASH_BLOCK_BYTES):
            last = min(first + HASH_BLOCK_BYTES, self._size(name))
            if begin <= first and last <= end:
                self._block(name, first, target[first - begin :])
                continue
            scratch = scratch or memoryview(bytearray(HASH_BLOCK_BYTES))
            block = self._block(name, first, scratch)
            low = max(first, begin)
            high = min(last, end)
            target[low - begin : high - begin] = block[low - first : high - first]

    def _block(self, name: str, begin: int, target: memoryview) -> memoryview:
        """Read the block of a tensor that starts at ``begin`` into the first bytes of ``target``; returns those bytes."""
        target = target[: min(HASH_BLOCK_BYTES, self._size(name) - begin)]
        self._read_into(self._begin + int(self._entries[name]["data_offsets"][0]) + begin, target)
        self._verify(target, self._first[name] + begin // HASH_BLOCK_BYTES)
        return target

    def _verify(self, content: memoryview, number: int) -> None:
        if xxhash.xxh3_64_hexdigest(content) != self._digests[DIGEST * number : DIGEST * (number + 1)]:
            raise self._differs()

    def _size(self, name: str) -> int:
        begin, end = self._entries[name]["data_offsets"]
        return int(end - begin)

    def _differs(self) -> BadCheckpoint:
        return BadCheckpoint(f"{self._name} differs from what was saved (its hash is wrong)")

    def _read(self, begin: int, size: int) -> bytes:
        content = bytearray(size)
        self._read_into(begin, memoryview(content))
        return bytes(content)

    def _read_into(self, begin: int, target: memoryview) -> None:
        if self._handle is None:
            self._handle = files.opened(self.path)
        while len(target):
            try:
                count = os.preadv(self._handle, [target], begin)
            except OSError as error:
                error.filename = str(self.path)
                raise
            if not count:
                raise self._differs()
            begin += count
            target = target[count:]
