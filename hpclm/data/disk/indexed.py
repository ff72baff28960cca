"""A dataset is n token sequences in one flat file, ``.bin``, and an index, ``.idx``, that says where each one lies.

hpclm/data/disk/formats.py describes the layouts of the index; ``.bin`` is the tokens, nothing else.
"""

import json
import mmap
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.data.disk.formats import mapped, read_index
from hpclm.data.disk.scan import check_all, check_ends
from hpclm.errors import ConfigError
from hpclm.files import fingerprint, readable

SCANNED = 1 << 20  # sequences, or documents, up to which opening looks at all of them: some 10 ms
SHIFTED = 64 << 20  # bytes of tokens that are turned into others in memory


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that Megatron stores the ids of ``vocab_size`` tokens in."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def files(prefix: str | Path) -> tuple[Path, Path, Path]:
    """Where the tokens, the index and the note about them lie: PREFIX.bin, PREFIX.idx, PREFIX.json."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), Path(f"{prefix}.json")


def sidecar(prefix: str | Path) -> dict[str, Any]:
    """What ``hpclm preprocess`` noted about the dataset; {} where there is no note, ConfigError where it is garbage."""
    path = files(prefix)[2]
    try:
        note = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"note {path} cannot be read: {error}; it belongs to the dataset: restore it, or remove it and set data.tokenizer"
        ) from None
    if not _is_note(note):
        raise ConfigError(f"note {path} is not what hpclm preprocess writes; remove it and set data.tokenizer")
    return note


def _is_note(note: Any) -> bool:
    tokenizer = note.get("tokenizer") if isinstance(note, dict) else None
    if not isinstance(tokenizer, dict):
        return False
    wanted = {"kind": str, "size": int, "files": dict}
    paths = note.get("tokenizer_files", [])
    return (
        all(isinstance(tokenizer.get(key), kind) for key, kind in wanted.items())
        and all(isinstance(content, str) for content in tokenizer["files"].values())
        and isinstance(paths, list)
        and all(isinstance(path, str) for path in paths)
    )


class IndexedDataset:
    """A dataset on disk, memory-mapped; ConfigError says what is wrong with its files.

    layout: "megatron", "fairseq" or "tntidx". dtype: as the tokens are stored.
    changed_ns: when the index was last written.
    sizes [n] int32 (TNTIDX: int64): tokens of each sequence.
    modes [n] int8: what Megatron's multimodal datasets say of each sequence; None in others.

    Opening looks at the header, the exact lengths of both files, and the first and last sequence and document, and at
    everything where that is at most ``SCANNED`` sequences; ``check`` always looks at everything.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path, _ = files(prefix)
        missing = [str(path) for path in (self.bin_path, self.idx_path) if not path.exists()]
        if missing:
            raise ConfigError(_not_there(self.prefix, missing))
        readable(self.idx_path, "index"), readable(self.bin_path, "token file")
        index, self.changed_ns = mapped(self.idx_path)
        self._maps = index, mapped(self.bin_path)[0]
        self._index = read_index(self.idx_path, self._maps[0])
        self.layout, self.dtype = self._index.layout, self._index.dtype
        self.sizes: NDArray = self._index.sizes
        self.modes = self._index.modes
        self._bytes = len(self._maps[1])
        check_ends(self._index, self.idx_path, self.bin_path, self._bytes)
        self._stored = np.frombuffer(self._maps[1], self.dtype)
        if max(len(self), self.document_count) <= SCANNED:
            self.check()

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.prefix,)

    @cached_property
    def flat(self) -> NDArray:
        """[tokens] all tokens in the order of the file, a view of it.

        A fairseq TNTIDX dataset stores other numbers than its tokens: a small one is turned into them in memory, a
        larger one is a ConfigError; ``tokens`` and ``block`` read any.
        """
        if not self._index.shift:
            return self._stored
        if self._bytes > SHIFTED:
            raise ConfigError(
                f"{self.prefix} has fairseq's old layout, whose tokens cannot be used as they are stored; "
                f"convert it first: hpclm data convert {self.prefix} NEW --layout megatron"
            )
        return self.block(0, self.token_count)

    @cached_property
    def pointers(self) -> NDArray[np.int64]:
        """[n] the first byte of each sequence in ``.bin``."""
        return self._index.starts if self._index.unit == 1 else self._index.starts * self._index.unit

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """[d] document k is the sequences documents[k] up to documents[k + 1]; made in memory where the file has none."""
        return self.bounds(0, self.document_count)

    @property
    def document_count(self) -> int:
        """Documents; in layouts without them, sequences."""
        documents = self._index.documents
        return len(self) if documents is None else len(documents) - 1

    @property
    def token_count(self) -> int:
        """Tokens of all sequences."""
        return len(self._stored)

    def bounds(self, begin: int, end: int) -> NDArray[np.int64]:
        """``documents[begin : end + 1]``, without holding the others."""
        documents = self._index.documents
        return np.arange(begin, end + 1) if documents is None else documents[begin : end + 1]

    def place(self, i: int) -> int:
        """Where sequence ``i`` begins in ``flat``; where they all end for i = n."""
        if i == len(self):
            return self.token_count
        return int(self._index.starts[i]) * self._index.unit // self.dtype.itemsize

    def places(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """``place`` of each of ``sequences`` [k], 0 to n and ascending."""
        found = np.full(len(sequences), self.token_count)
        inside = int(np.searchsorted(sequences, len(self)))
        found[:inside] = self._index.starts[sequences[:inside]] * self._index.unit // self.dtype.itemsize
        return found

    def tokens(self, i: int) -> NDArray:
        """Sequence ``i``, [sizes[i]], a view of the file; ConfigError where the index is wrong about it."""
        begin, size = self.place(i), int(self.sizes[i])
        if not (0 <= begin <= begin + size <= self.token_count):
            raise ConfigError(
                f"{self.idx_path}: sequence {i} is tokens {begin} to {begin + size} of {self.token_count}; "
                f"the index is damaged: hpclm data verify {self.prefix} says where it begins to be"
            )
        return self.block(begin, begin + size)

    def block(self, begin: int, end: int) -> NDArray:
        """``flat[begin:end]``, without holding the others."""
        stored, shift = self._stored[begin:end], self._index.shift
        if not shift:
            return stored
        if len(stored) and stored.min() < shift:
            where = begin + int(np.argmax(stored < shift))
            raise ConfigError(
                f"{self.bin_path}: token {where} is stored as {self._stored[where]}, but fairseq's old layout stores "
                "each token plus 1; it is damaged"
            )
        return stored - self.dtype.type(shift)

    def check(self, seen: Callable[[int], object] = lambda entries: None) -> None:
        """Look at every entry of the index, n + documents; ConfigError for the first that is wrong."""

        def done(entries: int) -> None:
            self.release()
            seen(entries)

        check_all(self._index, self.idx_path, self._bytes, done)

    def release(self) -> None:
        """Let go of what reading has brought into memory; it is read again when it is asked for."""
        for content in self._maps:
            if isinstance(content, mmap.mmap) and hasattr(content, "madvise"):
                content.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What changes when the dataset does, cheap to make, the same for a copy of it (JSON).

        Lengths and layout, and hashes of the files, whole up to 16 MB and of 64 blocks spread over longer ones.
        """
        return {
            "bin_bytes": self._bytes,
            "idx_bytes": len(self._maps[0]),
            "layout": self.layout,
            "dtype": self.dtype.name,
            "bin": fingerprint(self._maps[1]),
            "idx": fingerprint(self._maps[0]),
        }


def _not_there(prefix: Path, missing: list[str]) -> str:
    bin_path, idx_path, _ = files(prefix)
    folder = prefix.parent
    near = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx")) if folder.is_dir() else []
    hint = f"; {folder} has {', '.join(near[:5])}" if near else f"; no dataset lies in {folder.absolute()}"
    return f"a dataset is {bin_path} and {idx_path}, but {' and '.join(missing)} does not exist{hint}"
