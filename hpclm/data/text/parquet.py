"""The rows of a Parquet file as JSON lines. The only file that imports pyarrow, which is large."""

import io
import os
from typing import Any, BinaryIO

import orjson

from hpclm.errors import ConfigError

ROWS = 1 << 8  # that are decoded at a time


class Rows(io.RawIOBase):
    """Reads a Parquet file as lines, a JSON object for each row; ConfigError if it is corrupt."""

    def __init__(self, file: BinaryIO, path: str):
        import pyarrow
        from pyarrow import parquet

        self._path, self._error = path, pyarrow.ArrowException
        self._size, self._done, self._text, self._given = os.fstat(file.fileno()).st_size, 0, b"", 0
        try:
            opened = parquet.ParquetFile(file)
            self._count, self._batches = opened.metadata.num_rows, opened.iter_batches(ROWS)
        except (self._error, OSError) as error:
            raise self._corrupt(error) from None

    def readable(self) -> bool:
        """True, for io.BufferedReader."""
        return True

    def tell(self) -> int:
        """Bytes of the file that the rows so far stand for."""
        return self._size * self._done // max(1, self._count)

    def readinto(self, buffer: Any, /) -> int:
        """Fill some of ``buffer``; 0 at the end."""
        while self._given == len(self._text):
            try:
                rows = next(self._batches, None)
            except (self._error, OSError) as error:
                raise self._corrupt(error) from None
            if rows is None:
                return 0
            lines = [orjson.dumps(row, default=str) + b"\n" for row in rows.to_pylist()]  # dates, and bytes, as text
            self._text, self._given, self._done = b"".join(lines), 0, self._done + len(lines)
        found = memoryview(self._text)[self._given : self._given + len(buffer)]
        buffer[: len(found)] = found
        self._given += len(found)
        return len(found)

    def _corrupt(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._path} is truncated, corrupt, or not a Parquet file: {error}; copy or create it again"
        )
