"""Parquet and Arrow files as JSON lines, a few rows at a time. The only file that imports pyarrow, which is large.

Of Arrow's IPC both forms are read: the file (Feather, version 2), and the stream, which Hugging Face's datasets write.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import orjson

from hpclm.errors import ConfigError

ROWS = 1 << 8  # that are decoded at a time
PARQUET_MAGIC = b"PAR1"
FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def json_lines(file: BinaryIO, path: str, columns: Sequence[str]) -> Iterator[bytes]:
    """The rows of a table as lines, a JSON object of ``columns`` for each (none: of all); ConfigError if the file is corrupt
    or has no such column."""
    import pyarrow

    is_parquet = file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC or ".parquet" in path.lower()
    file.seek(0)
    try:
        names, batches = (_parquet if is_parquet else _arrow)(file, columns)
        if absent := [column for column in columns if column not in names]:
            raise ConfigError(f"{path} has no column {absent[0]!r}; it has {names}; select one with --column")
        for batch in batches:
            for first in range(0, batch.num_rows, ROWS):
                rows = batch.slice(first, ROWS).to_pylist()
                yield b"".join(_line(row) + b"\n" for row in rows)
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        kind = "a Parquet" if is_parquet else "an Arrow IPC"
        raise ConfigError(
            f"{path} is truncated, corrupt, or not {kind} file: {error}; copy or create it again"
        ) from None


def _line(row: dict[str, Any]) -> bytes:
    """A row as a JSON object; one with binary values that are not UTF-8 as bytes that are not, which readers of lines refuse."""
    try:
        return orjson.dumps(row, default=_plain)
    except orjson.JSONEncodeError:
        columns = (value for value in row.values() if isinstance(value, bytes))
        return b" ".join(columns).replace(b"\n", b" ") or b"\xff"  # nested values: a blank line would be left out


def _plain(value: Any) -> str:
    """Bytes as the text that they are in files of Spark and Hive, and dates as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _parquet(file: BinaryIO, columns: Sequence[str]) -> tuple[list[str], Iterable[Any]]:
    """The names of all columns, and batches of rows that have only ``columns``."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file, pre_buffer=False)  # else what is read ahead stays in memory to the end
    return table.schema_arrow.names, table.iter_batches(ROWS, columns=list(columns) or None)


def _arrow(file: BinaryIO, columns: Sequence[str]) -> tuple[list[str], Iterable[Any]]:
    """Names and batches of columns of an Arrow file. EOFError for a stream without its end mark: without a part of it, it may look whole."""
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
    return table.schema.names, (batch.select(list(columns)) if columns else batch for batch in batches)
