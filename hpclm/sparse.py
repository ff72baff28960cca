"""Holes of files: parts that were never written, which take no room and read as NUL bytes. A power cut may leave them."""

import errno
import os
from typing import BinaryIO


def hole_at(file: BinaryIO) -> int:
    """How many bytes from the position of an open file on are in a hole; 0 where that is not known."""
    handle, at = file.fileno(), file.tell()
    before = os.lseek(handle, 0, os.SEEK_CUR)  # ahead of ``at`` by what is buffered
    try:
        data = os.lseek(handle, at, os.SEEK_DATA)
    except OSError as error:
        data = os.fstat(handle).st_size if error.errno == errno.ENXIO else at  # no data up to the end; not supported
    os.lseek(handle, before, os.SEEK_SET)
    return max(0, data - at)
