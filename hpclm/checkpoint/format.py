"""Write safetensors files with a hash for every block, and read them block by block, verifying each.

The format is that of the safetensors library: the length of the header (8 bytes, little endian), the header (JSON: name ->
dtype, shape, data_offsets), then the values. It is implemented here because the library cannot hash while it writes, and
reads through a memory map, which kills the process if the disk fails.
"""

import json
import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from hpclm import files
from hpclm.checkpoint import schema
from hpclm.checkpoint.schema import ChecksumMismatch, FileInfo
from hpclm.rundir import rows

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
ENTRY = {
    "dtype": lambda value: isinstance(value, str) and value in TYPES,
    "shape": schema.shape,
    "data_offsets": schema.shape,
}
LARGEST = 1 << 28  # bytes of a header
BLOCK = 1 << 22  # bytes of a tensor that share a hash
DIGEST = 16  # characters of a hash: xxh3 of 64 bits, in hex


Named = Sequence[tuple[str, Tensor]]


def header(tensors: Named) -> bytes:
    """What a file with named tensors begins with."""
    entries, end = {}, 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned
    return struct.pack("<Q", len(text)) + text


def write(path: Path, tensors: Named) -> FileInfo:
    """Write named tensors to a new file; they are on disk when this returns. OSError if that fails."""
    text = header(tensors)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        digests, size = [_put(handle, memoryview(text))], len(text)
        for _, tensor in tensors:
            content = memory(tensor.detach().cpu().contiguous())
            size += len(content)
            digests += [_put(handle, content[begin : begin + BLOCK]) for begin in range(0, len(content), BLOCK)]
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
    """The entries of a header; ChecksumMismatch if they do not describe contiguous tensors of ``room`` bytes in all."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChecksumMismatch(f"{name} has a header that cannot be read: {error}") from None
    described: list[Any] = [*found.values()] if isinstance(found, dict) else [None]
    end = 0
    for entry in described:
        if not rows.sane(entry, ENTRY, ENTRY) or entry["data_offsets"][:1] != [end]:
            raise ChecksumMismatch(f"{name} has an invalid header")
        end += prod(entry["shape"]) * TYPES[entry["dtype"]].itemsize
        if entry["data_offsets"] != [entry["data_offsets"][0], end]:
            raise ChecksumMismatch(f"{name} has a header with inconsistent offsets")
    if end != room:
        raise ChecksumMismatch(f"{name} has {room} bytes of values, but its header describes {end}")
    return dict(found)


def _finite(block: memoryview, dtype: torch.dtype) -> bool:
    """Whether all values of a block are finite."""
    if not dtype.is_floating_point:
        return True
    values = torch.frombuffer(block, dtype=dtype)
    return bool(values.sum().isfinite() or values.isfinite().all())  # a sum is fast, but may overflow


class File:
    """A file written by ``write``, open for reading; raises ChecksumMismatch as soon as a mismatch is found."""

    def __init__(self, folder: Path, name: str, facts: FileInfo):
        """``name``: as in the manifest; the bytes may be in a node's file."""
        self.path, self._digests = folder / (facts.within or name), facts.xxh3
        self._name = f"{name} in {facts.within}" if facts.within else name
        self._handle: int | None = None
        with ExitStack() as failing:
            failing.callback(self.close)
            found = self.path.stat().st_size
            complete = found == facts.size if facts.within is None else found >= facts.offset + facts.size
            length = self._read(facts.offset, 8) if complete and facts.size >= 8 else b"\xff" * 8
            begin = 8 + struct.unpack("<Q", length)[0]
            if begin > min(facts.size, LARGEST):
                raise self._differs()
            text = self._read(facts.offset + 8, begin - 8)
            self._verify(memoryview(length + text), 0)
            self._entries = _entries(self._name, text, facts.size - begin)
            self._begin = facts.offset + begin
            self._first: dict[str, int] = {}
            """Index of the hash of each tensor's first block."""
            number = 1
            for name in self._entries:
                self._first[name], number = number, number + -(-self._size(name) // BLOCK)
            failing.pop_all()

    def close(self) -> None:
        """Close the file; it is reopened on the next read."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def check(self) -> list[str]:
        """Read and verify the whole file; the names of tensors with values that are not finite."""
        scratch, found = memoryview(bytearray(BLOCK)), dict[str, None]()
        for name, entry in self._entries.items():
            for begin in range(0, self._size(name), BLOCK):
                if not _finite(self._block(name, begin, scratch), TYPES[entry["dtype"]]):
                    found[name] = None
        return [*found]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; ChecksumMismatch if the file has no tensor of that name."""
        if name not in self._entries:
            raise ChecksumMismatch(f"{self._name} has no tensor {name}, which the manifest says it has")
        return tuple(self._entries[name]["shape"])

    def values(self, name: str, low: Sequence[int], high: Sequence[int]) -> Tensor:
        """Values from ``low`` up to but excluding ``high``. Reads the blocks that contain their rows (of the first dimension)."""
        shape, dtype = self.shape(name), TYPES[self._entries[name]["dtype"]]
        if not shape:
            low, high, shape = (0,), (1,), (1,)
        row = prod(shape[1:]) * dtype.itemsize
        rows = torch.empty((high[0] - low[0], *shape[1:]), dtype=dtype)
        self._read_tensor(name, low[0] * row, memory(rows))
        inside = (slice(None), *(slice(a, b) for a, b in zip(low[1:], high[1:], strict=True)))
        return rows[inside] if self.shape(name) else rows[0]

    def _read_tensor(self, name: str, begin: int, target: memoryview) -> None:
        """Read the bytes of a tensor from ``begin`` on into ``target``."""
        end = begin + len(target)
        scratch: memoryview | None = None
        for first in range(begin - begin % BLOCK, end, BLOCK):
            last = min(first + BLOCK, self._size(name))
            if begin <= first and last <= end:
                self._block(name, first, target[first - begin :])
                continue
            scratch = scratch or memoryview(bytearray(BLOCK))
            block, low, high = self._block(name, first, scratch), max(first, begin), min(last, end)
            target[low - begin : high - begin] = block[low - first : high - first]

    def _block(self, name: str, begin: int, target: memoryview) -> memoryview:
        """Read the block of a tensor that starts at ``begin`` into the first bytes of ``target``, and return those."""
        target = target[: min(BLOCK, self._size(name) - begin)]
        self._read_into(self._begin + int(self._entries[name]["data_offsets"][0]) + begin, target)
        self._verify(target, self._first[name] + begin // BLOCK)
        return target

    def _verify(self, content: memoryview, number: int) -> None:
        if xxhash.xxh3_64_hexdigest(content) != self._digests[DIGEST * number : DIGEST * (number + 1)]:
            raise self._differs()

    def _size(self, name: str) -> int:
        begin, end = self._entries[name]["data_offsets"]
        return int(end - begin)

    def _differs(self) -> ChecksumMismatch:
        return ChecksumMismatch(f"{self._name} differs from what was saved (its hash is wrong)")

    def _read(self, begin: int, size: int) -> bytes:
        found = bytearray(size)
        self._read_into(begin, memoryview(found))
        return bytes(found)

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
            begin, target = begin + count, target[count:]
