"""safetensors files, written front to back and hashed on the way, and read block by block.

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
BLOCK = 1 << 22  # bytes written, or read to be hashed, at once
LONGEST = 100_000_000  # bytes of a header, as the library has it


@dataclass(frozen=True)
class Facts:
    """What a file must still be when it is read again."""

    size: int
    """Bytes."""
    xxh3: str
    """xxh3-128 of them, in hex."""


def write(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> Facts:
    """Write tensors under their names; when this returns they are on the disk. OSError where they cannot be."""
    header, end = {}, 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned
    digest = xxhash.xxh3_128()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _put(handle, memoryview(struct.pack("<Q", len(text)) + text), digest)
        for _, tensor in tensors:
            _put(handle, memory(tensor.detach().cpu().contiguous()), digest)
        os.fsync(handle)
    finally:
        os.close(handle)
    return Facts(8 + len(text) + end, digest.hexdigest())


def facts(path: Path) -> Facts:
    """Size and hash of a file as it is now."""
    digest, size, block = xxhash.xxh3_128(), 0, memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return Facts(size, digest.hexdigest())


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in the CPU's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _put(handle: int, content: memoryview, digest: Any) -> None:
    for begin in range(0, len(content), BLOCK):
        block = content[begin : begin + BLOCK]
        digest.update(block)
        while len(block):
            block = block[os.write(handle, block) :]


def contents(path: Path) -> tuple[Tensor, Facts]:
    """The bytes of a file, and its size and hash: who uses these bytes uses what was hashed, and reads once."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        found = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8)
        target = memory(found)
        while count := file.readinto(target[size : size + BLOCK]):
            digest.update(target[size : size + count])
            size += count
    return found, Facts(size, digest.hexdigest())


class File:
    """A safetensors file that is open for reading; ValueError where it is none."""

    def __init__(self, path: Path, content: Tensor | None = None):
        """``content``: its bytes, where they are in memory already. What is read of them must not be written to."""
        self.path, self._content = path, content
        with ExitStack() as failing:
            self._handle = os.open(path, os.O_RDONLY)
            failing.callback(os.close, self._handle)
            length = struct.unpack("<Q", self._read(0, 8))[0]
            if length > LONGEST:
                raise ValueError(f"{path} has a header of {length} bytes; it is no safetensors file")
            self._begin = 8 + length
            self._entries: dict[str, dict[str, Any]] = json.loads(self._read(8, length))
            self._entries.pop("__metadata__", None)
            failing.pop_all()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)

    def names(self) -> list[str]:
        """Names of its tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of them."""
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Type of its values."""
        return TYPES[self._entries[name]["dtype"]]

    def block(self, name: str, low: Sequence[int], high: Sequence[int]) -> Tensor:
        """Values from ``low`` up to, without, ``high``. Read are the rows (of the first dimension) that they are in."""
        shape, dtype = self.shape(name), self.dtype(name)
        if not shape:
            return self._values(self._entries[name]["data_offsets"][0], (), dtype)
        row = prod(shape[1:])
        begin = self._entries[name]["data_offsets"][0] + low[0] * row * dtype.itemsize
        rows = self._values(begin, (high[0] - low[0], *shape[1:]), dtype)
        inside = (slice(None), *(slice(a, b) for a, b in zip(low[1:], high[1:], strict=True)))
        return rows[inside]

    def _values(self, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        begin += self._begin
        if self._content is not None and begin % dtype.itemsize == 0:
            return self._content[begin : begin + prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape))
        found = torch.empty(tuple(shape), dtype=dtype)
        self._read_into(begin, memory(found))
        return found

    def _read(self, begin: int, size: int) -> bytes:
        found = bytearray(size)
        self._read_into(begin, memoryview(found))
        return bytes(found)

    def _read_into(self, begin: int, target: memoryview) -> None:
        if self._content is not None and begin + len(target) <= len(self._content):
            target[:] = memory(self._content)[begin : begin + len(target)]
            return
        while len(target):
            count = os.preadv(self._handle, [target], begin)
            if not count:
                raise ValueError(f"{self.path} ends {len(target)} bytes too early")
            begin, target = begin + count, target[count:]
