"""Text of files that zstandard has compressed."""

from collections.abc import Iterator
from typing import BinaryIO

PIECE = 1 << 11  # compressed bytes passed to zstandard at a time; all of their text, up to 64 MiB, is held in memory
WINDOW = 1 << 31  # bytes of zstandard's largest window, for files of `zstd --long=31`


def decompressed(raw: BinaryIO) -> Iterator[bytes]:
    """The text of all frames of a .zst file; EOFError if it is corrupt, or, unlike in the library's own reader, truncated."""
    import zstandard

    library = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    frame, within = library.decompressobj(), False
    while piece := raw.read(PIECE):
        while piece:
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise EOFError(error) from None
            within, piece = not frame.eof, frame.unused_data
            if not within:
                frame = library.decompressobj()
    if within:
        raise EOFError("it ends within a frame")
