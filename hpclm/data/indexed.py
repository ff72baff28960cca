"""Read a dataset: n token sequences, concatenated in ``.bin``, and their index ``.idx`` (layouts: formats.py)."""

import json
import mmap
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError, unread
from hpclm.base.files import fingerprint, read_text, readable
from hpclm.data.formats import mapped, read_index
from hpclm.data.scan import SharedFacts, check_all, check_ends

SCANNED = 1 << 20  # sequences or documents that are all checked when a dataset is opened: some 10 ms

COUNTS = "counts"  # in PREFIX.json: see hpclm.preprocess.counts
T = TypeVar("T")


def token_dtype(vocab_size: int) -> np.dtype:
    """Megatron's type for token ids of a vocabulary of this size."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def files(prefix: str | Path) -> tuple[Path, Path, Path]:
    """The files of a dataset: PREFIX.bin (tokens), PREFIX.idx (index), PREFIX.json (tokenizer, content hash, counts)."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), Path(f"{prefix}.json")


def sidecar(prefix: str | Path) -> dict[str, Any]:
    """The content of PREFIX.json, such as "tokenizer" and "content"; {} without the file, ConfigError if it is invalid."""
    path = files(prefix)[2]
    try:
        note = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unread(error, path, "restore it, or remove it and set data.tokenizer") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; restore it, or remove it and set data.tokenizer") from None
    if not _is_note(note):
        raise ConfigError(f"{path} was not written by hpclm; remove it and set data.tokenizer")
    return note


def text_bytes(prefix: str | Path) -> int:
    """Bytes of text, in UTF-8, that the dataset's tokens restore; 0 if PREFIX.json does not say, as for conversations, or if some text is
    lost in unknown tokens or line ends."""
    counts = sidecar(prefix).get(COUNTS)
    if not isinstance(counts, dict) or counts.get("special") or counts.get("line_ends"):
        return 0
    size = counts.get("text_bytes")
    return size if type(size) is int else 0


def _is_note(note: Any) -> bool:
    if not isinstance(note, dict):
        return False
    tokenizer = note.get("tokenizer")
    if tokenizer is None:  # made by another project, and hashed by hpclm
        return isinstance(note.get("content"), dict)
    return (
        isinstance(tokenizer, dict)
        and isinstance(tokenizer.get("kind"), str)
        and type(tokenizer.get("size")) is int
        and type(tokenizer.get("eod")) in (int, type(None))
        and isinstance(tokenizer.get("files"), dict)
        and all(isinstance(text, str) for text in tokenizer["files"].values())
    )


class IndexedDataset:
    """A dataset on disk, memory-mapped; ConfigError describes the faults of its files.

    layout: "megatron" or "fairseq". dtype: type of the tokens. changed_ns: modification time of the index.
    flat [tokens]: all tokens, a view of the file.
    sizes [n] int32: tokens in each sequence. pointers [n] int64: offset of each sequence in ``.bin``, in bytes.
    modes [n] int8: modes of the sequences in Megatron's multimodal datasets; None in other datasets.

    Opening checks the header, the exact lengths of both files, and the first and last sequence and document. With at most ``SCANNED``
    sequences and documents, opening calls ``check`` too.
    """

    def __init__(self, prefix: str | Path, facts: SharedFacts | None = None):
        """``facts``: known facts about the files, found by this process or another one on the node; they are not read again."""
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path, _ = files(prefix)
        missing = [str(path) for path in (self.bin_path, self.idx_path) if not path.exists()]
        if missing:
            raise ConfigError(_not_there(self.prefix, missing))
        readable(self.idx_path, "index"), readable(self.bin_path, "token file")
        index, self.changed_ns = mapped(self.idx_path)
        tokens, changed_ns = mapped(self.bin_path)
        self._maps = index, tokens
        self.facts = facts or SharedFacts()
        self._name = f"{prefix}: {len(tokens)} bytes of {changed_ns}, {len(index)} of {self.changed_ns}"
        self._index = read_index(self.idx_path, self._maps[0])
        self.layout = self._index.layout
        self.dtype = self._index.dtype
        self.sizes = self._index.sizes
        self.pointers = self._index.starts
        self.modes = self._index.modes
        self._bytes = len(self._maps[1])
        check_ends(self._index, self.idx_path, self.bin_path, self._bytes)
        self.flat = np.frombuffer(self._maps[1], self.dtype)
        if max(len(self), self.document_count) <= SCANNED:
            self.check_once()

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """[d] document k consists of the sequences documents[k] to documents[k + 1] - 1."""
        return self.bounds(0, self.document_count)

    @property
    def document_count(self) -> int:
        """Number of documents. In a layout without documents, each sequence counts as one."""
        return len(self) if self._index.documents is None else len(self._index.documents) - 1

    @property
    def token_count(self) -> int:
        """Number of tokens in all sequences."""
        return len(self.flat)

    def bounds(self, begin: int, end: int) -> NDArray[np.int64]:
        """``documents[begin : end + 1]``, without loading other documents' bounds."""
        return np.arange(begin, end + 1) if self._index.documents is None else self._index.documents[begin : end + 1]

    def place(self, i: int) -> int:
        """Start of sequence ``i`` in ``flat``; for i = n, the end of the last."""
        if i == len(self):
            return self.token_count
        return int(self._index.starts[i]) // self.dtype.itemsize

    def holder(self, token: int) -> int:
        """The sequence that holds the token ``flat[token]``; the number of sequences after the last token."""
        if token >= self.token_count:
            return len(self)
        return bisect_right(range(len(self)), token, key=self.place) - 1  # NumPy would copy an unaligned array

    def document_at(self, token: int) -> int:
        """The document that holds the token ``flat[token]``."""
        sequence = self.holder(token)
        return bisect_right(range(self.document_count), sequence, key=lambda k: int(self.bounds(k, k)[0])) - 1

    def document_tokens(self, document: int) -> tuple[int, int]:
        """First and last + 1 token of ``document`` in ``flat``."""
        first, last = map(int, self.bounds(document, document + 1))
        return self.place(first), self.place(last)

    def places(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """``place`` of each of ``sequences`` [k], 0 to n and ascending."""
        places = np.full(len(sequences), self.token_count)
        inside = int(np.searchsorted(sequences, len(self)))
        places[:inside] = self._index.starts[sequences[:inside]] // self.dtype.itemsize
        return places

    def tokens(self, i: int) -> NDArray:
        """Sequence ``i``, [sizes[i]], a view of the file; ConfigError if the index is wrong."""
        begin = self.place(i)
        size = int(self.sizes[i])
        if not (0 <= begin <= begin + size <= self.token_count):
            raise ConfigError(
                f"{self.idx_path}: sequence {i} is tokens {begin} to {begin + size} of {self.token_count}; "
                f"the index is corrupt: hpclm data verify {self.prefix} shows where"
            )
        return self.flat[begin : begin + size]

    def raw(self, begin: int, end: int) -> memoryview:
        """The bytes of ``flat[begin:end]`` in the file."""
        width = self.dtype.itemsize
        return memoryview(self._maps[1])[begin * width : end * width]

    def raw_index(self) -> memoryview:
        """The bytes of the index."""
        return memoryview(self._maps[0])

    def check(self, progress: Callable[[int], object] = lambda entries: None) -> None:
        """Check every entry of the index, n + documents; ConfigError for the first wrong one."""

        def done(entries: int) -> None:
            self.release()
            progress(entries)

        check_all(self._index, self.idx_path, self._bytes, done)

    def check_once(self) -> None:
        """Run ``check``, unless the index is known to be right."""
        self.once("index", self.check)

    def find(self, fact: str, read: Callable[[], T]) -> T:
        """A fact (JSON) about the content of the files: the result of ``read``, unless it is known."""
        return self.facts.find(f"{self._name}: {fact}", read)

    def once(self, fact: str, check: Callable[[], object]) -> None:
        """``check`` the content of the files, unless it is known to have passed."""
        self.facts.once(f"{self._name}: {fact}", check)

    def release(self) -> None:
        """Release the memory of everything read so far; it is read again when needed."""
        for content in self._maps:
            if isinstance(content, mmap.mmap) and hasattr(content, "madvise"):
                content.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Identifies the content of the dataset, without reading all of it (JSON).

        Lengths, layout, and hashes of the files: all of a file up to 16 MB, 64 blocks of a larger one.
        """
        return {
            "bin_bytes": self._bytes,
            "idx_bytes": len(self._maps[0]),
            "layout": self.layout,
            "dtype": self.dtype.name,
            "bin": self.find("hash of .bin", lambda: fingerprint(self._maps[1])),
            "idx": self.find("hash of .idx", lambda: fingerprint(self._maps[0])),
        }


def _not_there(prefix: Path, missing: list[str]) -> str:
    if prefix.suffix in (".bin", ".idx") and prefix.is_file():
        return f"{prefix} is one of a dataset's files: leave off {prefix.suffix}"
    folder = prefix.parent
    near = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx"))
    hint = f"{folder} has {', '.join(near[:5])}" if near else "run hpclm preprocess first"
    verb = "do" if len(missing) > 1 else "does"
    return f"dataset not found: {' and '.join(missing)} {verb} not exist; {hint}"


def whereabouts(dataset: IndexedDataset, place: int) -> str:
    """Byte, document and sequence of the token ``flat[place]``, for messages."""
    sequence = bisect_right(range(len(dataset)), place, key=dataset.place) - 1
    return (
        f"byte {place * dataset.dtype.itemsize} (document {dataset.document_at(place)}, sequence {sequence}, "
        f"offset {place - dataset.place(sequence)} in it)"
    )
