"""Reads Parquet and Arrow files as JSON lines, a few rows at a time. The only file that imports pyarrow, which is large.

Both forms of Arrow IPC are supported: the file (Feather, version 2), and the stream, which Hugging Face's datasets write.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import orjson

from hpclm.base.errors import ConfigError

ROWS = 1 << 8  # rows decoded at a time
PARQUET_MAGIC = b"PAR1"
FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
Batches = Callable[[list[str]], Iterable[Any]]
"""Function from column names to batches of rows with only these columns."""


def json_lines(file: BinaryIO, path: str, columns: Sequence[str]) -> Iterator[bytes]:
    """The rows of a table as lines of JSON objects with the existing ones of ``columns`` (empty: all).

    ConfigError if the file is corrupt, has a value without a Python form, or has none of the columns.
    """
    import pyarrow

    kind, opened = "an Arrow IPC", _arrow
    if file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC or ".parquet" in path.lower():
        kind, opened = "a Parquet", _parquet
    file.seek(0)
    try:
        table, batches = opened(file)
        names = table.names
        selected = [column for column in columns or names if column in names]
        if not selected:
            wanted = " or ".join(map(repr, columns))
            raise ConfigError(f"{path} has no column {wanted}; it has {names}; select one by hpclm preprocess --column")
        for batch in batches(selected):
            for first in range(0, batch.num_rows, ROWS):
                yield b"".join(_line(row) + b"\n" for row in _rows(batch.slice(first, ROWS), path))
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        raise ConfigError(
            f"{path} is truncated, corrupt, or not {kind} file: {error}; copy or create it again"
        ) from None


def _rows(batch: Any, path: str) -> list[dict[str, Any]]:
    """The rows of a batch; ConfigError for a value without a Python form, such as a date after the year 9999."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    # includes text that is not UTF-8, and unknown time zones
    except (ArithmeticError, LookupError, ValueError) as error:
        raise ConfigError(
            f"{path} holds a value that cannot be read ({error}); correct or leave out that value"
        ) from None


def _line(row: dict[str, Any]) -> bytes:
    """A row as a JSON object. If binary values are not UTF-8, the line is not UTF-8 either, which readers of lines refuse."""
    try:
        return orjson.dumps(row, default=_plain)
    except orjson.JSONEncodeError:
        columns = (value for value in row.values() if isinstance(value, bytes))
        return (
            b" ".join(columns).replace(b"\n", b" ") or b"\xff"
        )  # the binary values are nested; readers would skip an empty line


def _plain(value: Any) -> str:
    """Bytes as text, because Spark and Hive store text as bytes; str() of other values, such as dates."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _parquet(file: BinaryIO) -> tuple[Any, Batches]:
    """The schema, and a function that gives batches of rows with chosen columns."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file, pre_buffer=False)  # otherwise data read ahead stays in memory to the end
    return table.schema_arrow, lambda columns: table.iter_batches(ROWS, columns=columns)


def _arrow(file: BinaryIO) -> tuple[Any, Batches]:
    """The same as ``_parquet`` for an Arrow file. EOFError for a stream without its end mark, since a truncated stream may look whole."""
    from pyarrow import ipc

    beginning = file.read(len(FILE_MAGIC))
    batches: Iterable[Any]
    if beginning == FILE_MAGIC:
        table = ipc.open_file(file)
        batches = (table.get_batch(number) for number in range(table.num_record_batches))
    else:
        file.seek(-len(END_OF_STREAM), os.SEEK_END)
        if file.read() != END_OF_STREAM:
            raise EOFError("it has no end mark")
        file.seek(0)
        table = batches = ipc.open_stream(file)
    return table.schema, lambda columns: (batch.select(columns) for batch in batches)
