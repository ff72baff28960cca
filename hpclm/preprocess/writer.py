"""Write datasets under temporary names; they are renamed when all files are complete.

formats.py describes the layouts: Megatron's, and fairseq's, which has no index of documents.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from hpclm.base.errors import ConfigError
from hpclm.base.files import aside, locked, sweep, sync
from hpclm.data import tokenizer_folder
from hpclm.data.content import KEY, DatasetContent
from hpclm.data.formats import DTYPES, FAIRSEQ_HEADER, FAIRSEQ_ONLY, HEADER, MAGIC, VERSION
from hpclm.data.indexed import files
from hpclm.preprocess.hashing import HashedFile

MAX_SEQUENCE_TOKENS = 2**31 - 1  # tokens in a sequence: sizes are int32
ITEMS_PER_WRITE = 1 << 20  # sequences or tokens written at a time

Layout = Literal["megatron", "fairseq"]
Own = TypeVar("Own", bound="Writer")


class Writer:
    """Writes a dataset, which appears or replaces an existing one when the `with` block ends without an exception.

    A crash before that leaves no readable dataset: ``.idx`` is renamed last. Memory use does not depend on the size. ConfigError for
    tokens that the type or layout cannot store, and, without ``replaces``, if another process has written a dataset of that name in the
    meantime.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, layout: Layout = "megatron", replaces: bool = True):
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.layout = layout
        self._replaces = replaces
        possible = {
            code: candidate for code, candidate in DTYPES.items() if layout == "fairseq" or code not in FAIRSEQ_ONLY
        }
        codes = [code for code, candidate in possible.items() if candidate == self.dtype]
        if not codes:
            names = [candidate.name for candidate in possible.values()]
            raise ConfigError(f"{layout}'s layout cannot store tokens as {self.dtype.name}; choose one of {names}")
        self._code = codes[0]
        self._range = np.iinfo(self.dtype)
        self._final = files(prefix)
        self._beside = tokenizer_folder.beside(prefix)
        self.write_beside: Callable[[Path], object] | None = None
        """Writes the folder of the tokenizer at the path that it is given."""
        self._open = ExitStack()
        self.content: DatasetContent | None = None
        """Hashes of the files, once they are complete."""
        self.tokens = self.sequences = self.documents = 0  # written so far
        self.open_tokens = 0
        """Tokens of a document begun by ``add_piece``."""
        self.note: dict[str, Any] | None = None
        """Content of PREFIX.json, besides the content hash."""

    def add_document(self, tokens: ArrayLike) -> None:
        """Append a document of one sequence, [tokens]."""
        given = np.asarray(tokens)
        self.extend(given, np.array([given.size]), np.array([1]))

    def add_piece(self, tokens: NDArray[np.integer], closes: bool) -> None:
        """Append tokens [t] of a document of one sequence. ``closes``: the document ends with them, and no piece follows."""
        self.open_tokens += tokens.size
        _check_length(self.open_tokens)
        self._write_tokens(tokens)
        if closes:
            self._sizes.write(np.array([self.open_tokens], "<i4").tobytes())
            self.sequences = self.sequences + 1
            self.documents = self.documents + 1
            self.open_tokens = 0
            self._bounds.write(np.array([self.sequences], "<i8").tobytes())

    def extend(
        self,
        tokens: NDArray[np.integer],
        sizes: NDArray[np.integer],
        documents: NDArray[np.integer],
        modes: NDArray[np.integer] | None = None,
    ) -> None:
        """Append documents: concatenated tokens [t], tokens in each sequence [s], sequences in each document [k].

        ``modes`` [s]: a number for each sequence of multimodal datasets; in every call or in none.
        """
        if sizes.sum() != tokens.size or documents.sum() != sizes.size:
            raise ValueError(
                f"sizes add up to {sizes.sum()}, but there are {tokens.size} tokens; documents add up to {documents.sum()}, but there are "
                f"{sizes.size} sequences"
            )
        if modes is not None:
            if self.sequences != self._modes.tell():
                raise ValueError("either all sequences have modes or none")
            self._modes.write(modes.astype("i1").tobytes())
        _check_length(int(sizes.max(initial=0)))
        if self.layout == "fairseq" and (modes is not None or (documents != 1).any()):
            number = int(np.argmax(documents != 1))
            what = "it has modes"
            if modes is None:
                what = f"document {self.documents + number} has {documents[number]} sequences"
            raise ConfigError(f"fairseq's layout cannot store this: {what}; choose --layout megatron")
        self._sizes.write(sizes.astype("<i4", copy=False).tobytes())
        self._bounds.write((self.sequences + np.cumsum(documents)).astype("<i8", copy=False).tobytes())
        self._write_tokens(tokens)
        self.sequences += sizes.size
        self.documents += documents.size

    def _write_tokens(self, tokens: NDArray[np.integer]) -> None:
        for start in range(0, tokens.size, ITEMS_PER_WRITE):
            self._stream.write(self._fitting(tokens[start : start + ITEMS_PER_WRITE]).data)
        self.tokens += tokens.size

    def _fitting(self, tokens: NDArray) -> NDArray:
        if tokens.dtype != self.dtype:
            low = int(tokens.min())
            high = int(tokens.max())
            if low < self._range.min or high > self._range.max:
                raise ConfigError(f"token ids {low} to {high} do not fit in {self.dtype.name}")
        return np.ascontiguousarray(tokens, self.dtype)

    def __enter__(self: Own) -> Own:
        if self._beside.exists() and not (self._beside / tokenizer_folder.NOTE).is_file():
            raise ConfigError(
                f"{self._beside} exists and was not written by hpclm; move it, or choose another output name"
            )
        for path in (*self._final, self._beside):
            sweep(path)
        tokens, index, note = (aside(path) for path in self._final)
        self._tokens = self._new(tokens)
        self._index = self._new(index)
        self._note = self._new(note)
        self._folder = aside(self._beside)
        self._open.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._sizes, self._bounds, self._modes = (
            self._new(Path(f"{index}-{part}")) for part in ("sizes", "bounds", "modes")
        )
        self._stream = HashedFile(self._tokens)
        self._indexed = HashedFile(self._index)
        self._bounds.write(bytes(8))  # the first document begins at sequence 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._open:
            if kind is None:
                if self.content is None:
                    self.finish()
                self._publish()

    def _new(self, path: Path) -> IO[bytes]:
        """A new file, closed at the end, and removed unless it was renamed."""
        file = path.open("w+b")

        def discard() -> None:
            with suppress(OSError):  # on a full disk closing fails too
                file.close()
            path.unlink(missing_ok=True)

        self._open.callback(discard)
        return file

    def finish(self) -> None:
        """Complete and check the files, so that only renaming remains. Called at the end of the `with` block; with several datasets,
        call it earlier so that none appears if one fails."""
        if self._modes.tell() not in (0, self.sequences):
            raise ValueError("either all sequences have modes or none")
        self._write_index()
        bin, blocks = self._stream.hasher.end()
        self.content = DatasetContent(bin, self._indexed.hasher.end()[0], blocks)
        if self.write_beside:
            self.write_beside(self._folder)
        noted = (self.note or {}) | {KEY: self.content.note()}
        self._note.write(json.dumps(noted, indent=1, ensure_ascii=False).encode() + b"\n")
        for file in (self._tokens, self._index, self._note):
            file.flush()
            os.fsync(file.fileno())

    def _publish(self) -> None:
        tokens, index, note = self._final
        with locked(index.parent):  # so that two processes do not mix their files
            if not self._replaces and index.exists():
                raise ConfigError(f"{index} was written by another process in the meantime; it is not replaced")
            index.unlink(missing_ok=True)  # first: an old index must not be opened with new tokens
            note.unlink(missing_ok=True)
            shutil.rmtree(self._beside, ignore_errors=True)
            if self._folder.exists():
                self._folder.replace(self._beside)
            for file, final in ((self._tokens, tokens), (self._note, note), (self._index, index)):
                Path(file.name).replace(final)
        sync(index.parent)

    def _write_index(self) -> None:
        counts = (self.sequences, self.documents + 1)
        head = HEADER.pack(MAGIC, VERSION, self._code, *counts)
        if self.layout == "fairseq":
            head = head[: FAIRSEQ_HEADER.size]
        self._indexed.write(head)
        _copy(self._sizes, self._indexed)
        self._sizes.seek(0)
        end = 0
        while block := self._sizes.read(4 * ITEMS_PER_WRITE):
            bytes_ = np.frombuffer(block, "<i4").astype("<i8") * self.dtype.itemsize
            ends = end + np.cumsum(bytes_)
            self._indexed.write((ends - bytes_).tobytes())
            end = int(ends[-1])
        if self.layout == "megatron":
            _copy(self._bounds, self._indexed)
            _copy(self._modes, self._indexed)


def _copy(source: IO[bytes], target: HashedFile) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, 1 << 20)


def _check_length(tokens: int) -> None:
    """ConfigError if an index cannot hold the length of a sequence of ``tokens`` tokens."""
    if tokens > MAX_SEQUENCE_TOKENS:
        raise ConfigError(
            f"a sequence of {tokens} tokens is too long: an index holds at most {MAX_SEQUENCE_TOKENS}; divide the text into several "
            "files, or give --format lines"
        )
