"""Parquet files as JSON lines. The only file that imports pyarrow, which is large."""

from collections.abc import Iterator
from typing import BinaryIO

import orjson

from hpclm.errors import ConfigError

ROWS = 1 << 8  # that are decoded at a time


def json_lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The rows of a Parquet file as lines, a JSON object for each; ConfigError if it is corrupt."""
    import pyarrow
    from pyarrow import parquet

    try:
        for rows in parquet.ParquetFile(file).iter_batches(ROWS):
            yield b"".join(orjson.dumps(row, default=str) + b"\n" for row in rows.to_pylist())  # dates as text
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} is truncated, corrupt, or not a Parquet file: {error}; copy or create it again"
        ) from None
