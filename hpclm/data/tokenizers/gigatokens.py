"""GPT-2's byte-level BPE with the gigatoken library, which only this file imports: fast, with the ids of ``tokenizers``.

The libraries have tables of different Unicode versions, so they may split text differently. Texts with characters that they
classify differently are encoded with ``tokenizers``; tests/data/tokenizers/test_gigatoken.py compares all of Unicode.
"""

import logging
import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hpclm import extras
from hpclm.data.tokenizers.interface import Batch

log = logging.getLogger("hpclm")

# Letters and digits of Unicode 17, which gigatoken 0.10 supports and tokenizers 0.23 does not.
ADDED = [
    (0x88F, 0x88F),  # Arabic
    (0xC5C, 0xC5C),  # Telugu
    (0xCDC, 0xCDC),  # Kannada
    (0xA7CE, 0xA7CF),  # Latin
    (0xA7D2, 0xA7D2),
    (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1),
    (0x10940, 0x10959),  # Sidetic
    (0x10EC5, 0x10EC7),  # Arabic
    (0x11DB0, 0x11DDB),  # Tolong Siki
    (0x11DE0, 0x11DE9),
    (0x16EA0, 0x16EB8),  # Beria Erfe
    (0x16EBB, 0x16ED3),
    (0x16FF2, 0x16FF6),  # Chinese
    (0x187F8, 0x187FF),  # Tangut
    (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2),
    (0x1E6C0, 0x1E6DE),  # Tai Yo
    (0x1E6E0, 0x1E6E2),
    (0x1E6E4, 0x1E6E5),
    (0x1E6E7, 0x1E6ED),
    (0x1E6F0, 0x1E6F4),
    (0x1E6FE, 0x1E6FF),
    (0x2B73A, 0x2B73F),  # Chinese
    (0x2CEA2, 0x2CEAD),
    (0x323B0, 0x33479),
]
COMPARED = {"gigatoken": "0.10", "tokenizers": "0.23"}  # ADDED is valid for these versions
SLICE = 1 << 21  # characters that are encoded at a time
MARKERS = 32  # searching every text for more of them takes too long
LOOKED_UP = 1 << 18  # characters that are looked up in the table at a time
GROWTH = 48 << 20  # bytes of memory growth after which the library's object is recreated
KEPT = 6  # bytes that the library caches, at most, per byte of new words

SLOWER = "encoding with tokenizers, many times slower"

Encode = Callable[[list[str]], Batch]


def faster(settings: str, exact: Encode, markers: list[str]) -> "Fast | None":
    """A faster ``exact``; None, with a warning, if that is not possible.

    settings: tokenizer.json of a GPT-2-style BPE without added tokens; exact: encode_batch of that BPE with added tokens, by
    the tokenizers library; markers: the added tokens.
    """
    if len(markers) > MARKERS:
        text = "%s: the tokenizer has %d added tokens, and gigatoken is only used with up to %d"
        log.warning(text, SLOWER, len(markers), MARKERS)
        return None
    if extras.missing("encoding", "gigatoken"):
        log.warning("%s: gigatoken is not installed; %s", SLOWER, extras.install("gigatoken"))
        return None
    try:
        found_versions = {name: ".".join(version(name).split(".")[:2]) for name in COMPARED}
        if found_versions != COMPARED:
            log.warning(
                "%s: hpclm has been tested with %s, not with %s", SLOWER, _words(COMPARED), _words(found_versions)
            )
            return None
        fast = Fast(settings, exact, markers)
        texts = probe()
        wanted, _ = exact(texts)
        found = [id for text in texts for id in fast.encode(text)]
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        log.warning("%s: gigatoken does not work here (%s)", SLOWER, error)
        return None
    if not np.array_equal(wanted, found):
        log.warning("%s: gigatoken returns other ids for a test text", SLOWER)
        return None
    return fast


class Fast:
    """Encodes with gigatoken, and texts for which its ids may differ with ``exact``."""

    def __init__(self, settings: str, exact: Encode, markers: list[str]):
        self._settings, self._exact, self._markers = settings, exact, [marker for marker in markers if marker]
        self._differs = np.zeros(0x110000, bool)
        for first, last in ADDED:
            self._differs[first : last + 1] = True
        self._library = _load(settings)
        self._read = self._looked = 0
        self._base: int | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        if self._slow([text]):
            return self._exact([text])[0].tolist()
        ids: list[int] = self._library.encode(text).tolist()  # unlike a batch, without importing awkward for 0.2 s
        self._renew(len(text))
        return ids

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text."""
        slow = self._slow(texts)
        if not slow:
            return self._fast(texts)
        is_slow = np.zeros(len(texts), bool)
        is_slow[slow] = True
        parts = [self._exact([texts[i] for i in slow]), self._fast([texts[i] for i in np.flatnonzero(~is_slow)])]
        lengths = np.empty(len(texts), np.int64)
        lengths[is_slow], lengths[~is_slow] = parts[0][1], parts[1][1]
        ids = np.empty(int(lengths.sum()), np.int64)
        from_slow = np.repeat(is_slow, lengths)
        ids[from_slow], ids[~from_slow] = parts[0][0], parts[1][0]
        return ids, lengths

    def _slow(self, texts: list[str]) -> list[int]:
        """Indices of texts with characters that the libraries classify differently, or with markers."""
        together = "".join(texts)  # one search is faster than many
        suspects = [i for i, text in enumerate(texts) if self._differ(text)] if self._differ(together) else []
        markers = [marker for marker in self._markers if marker in together]
        if markers:
            suspects += [i for i, text in enumerate(texts) if any(marker in text for marker in markers)]
        return sorted(set(suspects))

    def _differ(self, text: str) -> bool:
        if text.isascii():
            return False
        parts = (text[start : start + LOOKED_UP] for start in range(0, len(text), LOOKED_UP))
        return any(self._differs.take(np.frombuffer(part.encode("utf-32-le"), np.uint32)).any() for part in parts)

    def _fast(self, texts: list[str]) -> Batch:
        parts = [self._encoded(some, characters) for some, characters in _slices(texts)]
        if len(parts) == 1:
            return parts[0]
        ids, lengths = zip(*parts, strict=True) if parts else ([np.empty(0, np.uint32)], [np.empty(0, np.int64)])
        return np.concatenate(ids), np.concatenate(lengths)

    def _encoded(self, texts: list[str], characters: int) -> Batch:
        layout = self._library.encode_batch(texts, parallel=False).layout
        bounds = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[bounds[0] : bounds[-1]]
        self._renew(characters)
        return ids, np.diff(bounds)

    def _renew(self, characters: int) -> None:
        """Recreate the library's object, in 0.1 s, after memory has grown: it caches every new word forever, in about 5
        bytes per byte.
        """
        self._read += characters
        if self._read - self._looked < SLICE:
            return
        self._looked = self._read
        held = _resident(self._read)
        if self._base is None:
            self._base = held
        elif held - self._base > GROWTH:
            self._library = None  # free it first
            self._library, self._base = _load(self._settings), None


def probe() -> list[str]:
    """Test texts for which both libraries must return the same ids.

    The first has both ends of every range of letters, digits, white space and other characters, each followed by "'s", which is
    a separate word after letters and digits only.
    """
    codes = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    kinds = [_kind(chr(code)) for code in codes]
    edges = {code for i, code in enumerate(codes) if i and kinds[i] != kinds[i - 1] for code in codes[i - 1 : i + 1]}
    edges -= {code for first, last in ADDED for code in range(first, last + 1)}
    return [
        "".join(f"{chr(code)}'s" for code in sorted(edges)),
        "Hello  world,\n\n\tit's 2024: we'll, I'VE, they're \u3000 done... <|endoftext|></s>[SEP]",
        "天地玄黄，宇宙洪荒 e\u0301 \U0001f469\u200d\U0001f52c ١٢٣ x² ½\r\n Ünïcödé\u00a0\u0085\u2028\x00\x1c",
        "a" * 300 + " " * 300 + "ab" * 300 + "-" * 300,
        "",
    ]


def _kind(character: str) -> str:
    kind = unicodedata.category(character)[0]
    return kind if kind in "LN" else "Z" if character.isspace() else "other"


def _words(versions: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {number}" for name, number in versions.items())


def _load(settings: str) -> Any:
    from gigatoken.gigatoken_rs import load_hf_json

    return load_hf_json(settings)


def _slices(texts: list[str]) -> Iterator[tuple[list[str], int]]:
    """``texts`` in order, in slices of about SLICE characters, and their characters."""
    first = held = 0
    for last, length in enumerate(map(len, texts)):
        if held and held + length > SLICE:
            yield texts[first:last], held
            first, held = last, 0
        held += length
    if texts:
        yield texts[first:], held


def _resident(read: int) -> int:
    """Resident memory in bytes; an estimate from ``read`` characters if it is unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return KEPT * read
