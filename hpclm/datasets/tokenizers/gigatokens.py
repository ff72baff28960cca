"""GPT-2's byte-level BPE with the gigatoken library, which only this file imports: fast, with the ids of ``tokenizers``.

The libraries have tables of different Unicode versions, so they may split text differently. Texts with characters that they
classify differently are encoded with ``tokenizers``; tests/data/tokenizers/test_gigatoken.py compares all of Unicode.
"""

import logging
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hpclm import extras
from hpclm.data.tokenizers import Batch

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
MARKERS = 32  # searching every text for more of them takes too long
LOOKED_UP = 1 << 18  # characters that are looked up in the table at a time
INTERVAL = 1 << 21  # characters between looks at the memory
GROWTH = 48 << 20  # bytes of it after which the library's object is recreated, as it caches every new word for ever

SLOWER = "encoding with tokenizers, many times slower"
TEXTS = [
    "Hello  world,\n\n\tit's 2024: we'll, I'VE, they're \u3000 done... <|endoftext|></s>[SEP]",
    "天地玄黄，宇宙洪荒 e\u0301 \U0001f469\u200d\U0001f52c ١٢٣ x² ½\r\n Ünïcödé\u00a0\u0085\u2028\x00\x1c",
    "a" * 300 + " " * 300 + "ab" * 300 + "-" * 300,
    "",
]
"""Both libraries must return the same ids for these."""

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
        versions = {name: ".".join(version(name).split(".")[:2]) for name in COMPARED}
        if versions != COMPARED:
            log.warning("%s: hpclm has been tested with %s, not with %s", SLOWER, _listed(COMPARED), _listed(versions))
            return None
        fast = Fast(settings, exact, markers)
        same = np.array_equal(exact(TEXTS)[0], np.concatenate([fast.encode(text) for text in TEXTS]))
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        log.warning("%s: gigatoken does not work here (%s)", SLOWER, error)
        return None
    if not same:
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
        self._encoded, self._base = 0, 0

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        if self._slow([text]):
            return self._exact([text])[0].tolist()
        self._renew(len(text))
        ids: list[int] = self._library.encode(text).tolist()  # unlike a batch, without importing awkward for 0.2 s
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
        self._renew(sum(map(len, texts)))
        layout = self._library.encode_batch(texts, parallel=False).layout
        bounds = np.asarray(layout.offsets.data)
        return np.asarray(layout.content.data)[bounds[0] : bounds[-1]], np.diff(bounds)

    def _renew(self, characters: int) -> None:
        self._encoded += characters
        if self._encoded < INTERVAL:
            return
        self._encoded, resident = 0, _resident()
        if not self._base:
            self._base = resident
        elif resident - self._base > GROWTH:
            self._library = None  # free it first
            self._library, self._base = _load(self._settings), 0


def _listed(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {number}" for name, number in versions.items())


def _resident() -> int:
    """Resident memory in bytes; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _load(settings: str) -> Any:
    from gigatoken.gigatoken_rs import load_hf_json

    return load_hf_json(settings)
