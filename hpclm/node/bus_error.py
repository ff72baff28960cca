"""A mapped file that becomes shorter while it is read is a bus error, which would end the process without a word. Here it is explained.

The handler is called in the thread that reads, in the middle of a copy from the file, so it may run Python, but cannot return: the same
byte would be read again.
"""

import ctypes
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hpclm import files

MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r--s ([0-9a-f]+) \S+ (\d+) +(/.*)")
"""Of /proc/self/maps, a mapping that is shared and only read, as those of data are: range, offset, inode, path."""
DELETED = " (deleted)"  # after the path of a file that has been removed, or replaced by another


@dataclass(frozen=True)
class MappedFile:
    """A file that this process has mapped into memory."""

    path: str
    """As the kernel names it, perhaps with DELETED."""
    size: int
    """In bytes, when it was mapped; at a later look to the end of its last page."""


def mapped_files() -> list[MappedFile]:
    """The files that this process has mapped and only reads (Linux)."""
    ends: dict[str, int] = {}
    with suppress(OSError):
        for line in files.read_text("/proc/self/maps", errors="surrogateescape").splitlines():
            if mapping := MAPPING.fullmatch(line):
                begin, end, offset = (int(number, 16) for number in mapping.groups()[:3])
                ends[mapping[5]] = max(ends.get(mapping[5], 0), offset + end - begin)
    return [MappedFile(path, end) for path, end in ends.items()]


def changes(before: dict[str, int]) -> list[str]:
    """What has happened to the mapped files, a sentence for each that is no longer as long; ``before``: sizes in bytes by path."""
    said = []
    for file in mapped_files():
        path = file.path.removesuffix(DELETED)
        if file.path.endswith(DELETED):
            said.append(f"{path} was removed, or replaced by another file, while it was read")
            continue
        size = before.get(path, file.size)
        with suppress(OSError):
            now = os.stat(path).st_size  # noqa: PTH116 - it need not be valid UTF-8
            if now < size - (0 if path in before else os.sysconf("SC_PAGE_SIZE") - 1):
                about = "" if path in before else "about "
                said.append(
                    f"{path} was cut while it was read: it had {about}{size:,} bytes at the start and has {now:,} now"
                )
    return said


@contextmanager
def explained(report: Callable[[str], object]) -> Iterator[None]:
    """In the block, a bus error that comes from a mapped file which has been cut calls ``report`` with the cause, which should end the
    process. Any other one, and what ``report`` does not end, ends it as before."""
    libc = ctypes.CDLL(None)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = dict[str, int]()
    for file in mapped_files():
        with suppress(
            OSError
        ):  # it may have been removed, or be another user's: what this process has mapped was opened before
            before[file.path] = os.stat(file.path).st_size  # noqa: PTH116 - it need not be valid UTF-8
    previous: int | None = None

    def handle(number: int) -> None:
        libc.signal(number, previous)
        if causes := changes(before):
            report(f"{'; '.join(causes)}; restore {'it' if len(causes) == 1 else 'them'}, and start again")
        signal.raise_signal(number)  # when this function has returned; it may have come from kill

    handler = kind(handle)
    previous = libc.signal(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGBUS, previous)
