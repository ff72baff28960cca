"""safetensors files, written front to back, and read a block at a time, each held against its hash.

The format is the safetensors library's: the length of a header (8 bytes, little endian), the header (JSON: name -> dtype,
shape, data_offsets), then the values. Written here because the library writes a file in one go, which leaves the hash to a
second reading, and maps a file to read it, which ends the process where a disk fails.
"""

import json
import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

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
BLOCK = 1 << 22  # bytes of a tensor, from its first on, that have a hash of their own
DIGEST = 16  # characters of a hash: xxh3 of 64 bits, in hex


class Differs(ValueError):
    """What a file holds is not what was written into it."""


@dataclass(frozen=True)
class Facts:
    """What a file must still be when it is read again."""

    size: int
    """Bytes."""
    xxh3: str
    """Hashes, DIGEST characters each: of the header with its length, then of every tensor's blocks, in the file's order."""


def write(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> Facts:
    """Write tensors under their names; when this returns they are on the disk. OSError where they cannot be."""
    header, end = {}, 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        digests = [_put(handle, memoryview(struct.pack("<Q", len(text)) + text))]
        for _, tensor in tensors:
            content = memory(tensor.detach().cpu().contiguous())
            digests += [_put(handle, content[begin : begin + BLOCK]) for begin in range(0, len(content), BLOCK)]
        os.fsync(handle)
    finally:
        os.close(handle)
    return Facts(8 + len(text) + end, "".join(digests))


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in the CPU's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _put(handle: int, block: memoryview) -> str:
    """Write a block; its hash."""
    digest = xxhash.xxh3_64_hexdigest(block)
    while len(block):
        block = block[os.write(handle, block) :]
    return digest


class File:
    """A file that ``write`` wrote, open for reading; Differs where, or once, it is seen that it is not as it was written."""

    def __init__(self, path: Path, facts: Facts):
        self.path, self._digests = path, facts.xxh3
        self._handle: int | None = None
        with ExitStack() as failing:
            failing.callback(self.close)
            length = self._read(0, 8) if path.stat().st_size == facts.size >= 8 else b"\xff" * 8
            self._begin = 8 + struct.unpack("<Q", length)[0]
            if self._begin > facts.size:
                raise self._differs()
            text = self._read(8, self._begin - 8)
            self._hold(memoryview(length + text), 0)
            self._entries: dict[str, dict[str, Any]] = json.loads(text)
            self._first: dict[str, int] = {}
            """Number of the hash of each tensor's first block."""
            number = 1
            for name in self._entries:
                self._first[name], number = number, number + -(-self._size(name) // BLOCK)
            failing.pop_all()

    def close(self) -> None:
        """Let go of the file; who reads on opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def check(self) -> None:
        """Read all of it; Differs where it is not as it was written."""
        scratch = memoryview(bytearray(BLOCK))
        for name in self._entries:
            for begin in range(0, self._size(name), BLOCK):
                self._block(name, begin, scratch)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._entries[name]["shape"])

    def values(self, name: str, low: Sequence[int], high: Sequence[int]) -> Tensor:
        """Values from ``low`` up to, without, ``high``. Read are the blocks that their rows (of the first dimension) are in."""
        shape, dtype = self.shape(name), TYPES[self._entries[name]["dtype"]]
        if not shape:
            low, high, shape = (0,), (1,), (1,)
        row = prod(shape[1:]) * dtype.itemsize
        rows = torch.empty((high[0] - low[0], *shape[1:]), dtype=dtype)
        self._read_tensor(name, low[0] * row, memory(rows))
        inside = (slice(None), *(slice(a, b) for a, b in zip(low[1:], high[1:], strict=True)))
        return rows[inside] if self.shape(name) else rows[0]

    def _read_tensor(self, name: str, begin: int, target: memoryview) -> None:
        """The bytes of a tensor from ``begin`` on."""
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
        """Read the block of a tensor that begins at ``begin`` into the first bytes of ``target``, which are given back."""
        target = target[: min(BLOCK, self._size(name) - begin)]
        self._read_into(self._begin + int(self._entries[name]["data_offsets"][0]) + begin, target)
        self._hold(target, self._first[name] + begin // BLOCK)
        return target

    def _hold(self, content: memoryview, number: int) -> None:
        """Differs where a hash is not what it was."""
        if xxhash.xxh3_64_hexdigest(content) != self._digests[DIGEST * number : DIGEST * (number + 1)]:
            raise self._differs()

    def _size(self, name: str) -> int:
        begin, end = self._entries[name]["data_offsets"]
        return int(end - begin)

    def _differs(self) -> Differs:
        return Differs(f"{self.path.name} differs from what was saved (its hash is wrong)")

    def _read(self, begin: int, size: int) -> bytes:
        found = bytearray(size)
        self._read_into(begin, memoryview(found))
        return bytes(found)

    def _read_into(self, begin: int, target: memoryview) -> None:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY)
        while len(target):
            try:
                count = os.preadv(self._handle, [target], begin)
            except OSError as error:
                error.filename = str(self.path)
                raise
            if not count:
                raise self._differs()
            begin, target = begin + count, target[count:]
