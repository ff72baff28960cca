"""GPT-2's byte-level BPE with the gigatoken library, which only this file imports: fast, with the same ids as ``tokenizers``.

The libraries use tables of different Unicode versions, so they may split text differently. Texts with characters that they classify
differently are encoded with ``tokenizers``; tests/preprocess/tokenizers/test_gigatoken.py compares all of Unicode.
"""

import logging
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hpclm.base import extras
from hpclm.data.tokenizers import Batch

log = logging.getLogger("hpclm")

ADDED = (
    "88f c5c cdc a7ce-a7cf a7d2 a7d4 a7f1 10940-10959 10ec5-10ec7 11db0-11ddb 11de0-11de9 16ea0-16eb8 "
    "16ebb-16ed3 16ff2-16ff6 187f8-187ff 18d09-18d1e 18d80-18df2 1e6c0-1e6de 1e6e0-1e6e2 1e6e4-1e6e5 "
    "1e6e7-1e6ed 1e6f0-1e6f4 1e6fe-1e6ff 2b73a-2b73f 2cea2-2cead 323b0-33479"
)
"""Letters and digits of Unicode 17 that gigatoken 0.10 supports, but tokenizers 0.23 does not."""
COMPARED = {"gigatoken": "0.10", "tokenizers": "0.23"}  # ADDED is valid for these versions
MARKERS = 32  # with more, searching every text takes too long
LOOKED_UP = 1 << 18  # characters looked up in the table at a time
INTERVAL = 1 << 21  # characters between memory checks
GROWTH = 48 << 20  # bytes of memory after which the library's object is recreated, as it caches every new word forever

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

    ``settings``: tokenizer.json of a GPT-2-style BPE without added tokens. ``exact``: encode_batch of that BPE with added tokens, by the
    tokenizers library. ``markers``: the added tokens.
    """
    try:
        if len(markers) > MARKERS:
            raise ValueError(f"it has {len(markers)} added tokens, but gigatoken is used with at most {MARKERS}")
        unsuitable = why_unsuitable()
        if unsuitable:
            raise ValueError(unsuitable)
        fast = Fast(settings, exact, markers)
        if not np.array_equal(exact(TEXTS)[0], np.concatenate([fast.encode(text) for text in TEXTS])):
            raise ValueError("gigatoken returns other ids for a test text")
        return fast
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        log.warning("encoding with tokenizers, many times slower: %s", error)
        return None


def why_unsuitable() -> str | None:
    """The reason why the installed libraries must not be used together, or None."""
    if extras.missing("encoding", "gigatoken"):
        return f"gigatoken is not installed; {extras.install('gigatoken')}"
    versions = {name: ".".join(version(name).split(".")[:2]) for name in COMPARED}
    return None if versions == COMPARED else f"hpclm has been tested with {COMPARED}, not with {versions}"


class Fast:
    """Encodes with gigatoken; uses ``exact`` for texts that gigatoken may encode differently."""

    def __init__(self, settings: str, exact: Encode, markers: list[str]):
        self._settings = settings
        self._exact = exact
        self._markers = [marker for marker in markers if marker]
        self._differs = np.zeros(0x110000, bool)
        for item in ADDED.split():
            first, _, last = item.partition("-")
            self._differs[int(first, 16) : int(last or first, 16) + 1] = True
        self._library = _load(settings)
        self._encoded = 0
        self._base = 0

    def encode(self, text: str) -> list[int]:
        """The same ids as ``exact`` gives for ``text``."""
        if self.needs_exact(text):
            return self._exact([text])[0].tolist()
        self._renew(len(text))
        ids: list[int] = self._library.encode(text).tolist()  # unlike a batch, without importing awkward for 0.2 s
        return ids

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text; all are encoded exactly if one needs it."""
        together = "".join(texts)
        if self.needs_exact(together):
            return self._exact(texts)
        self._renew(len(together))
        import_module("awkward")  # a signal during this import would make the library report a missing module
        layout = self._library.encode_batch(texts, parallel=False).layout
        bounds = np.asarray(layout.offsets.data)
        return np.asarray(layout.content.data)[bounds[0] : bounds[-1]], np.diff(bounds)

    def needs_exact(self, text: str) -> bool:
        """Whether ``text`` has a marker, or a character that the libraries classify differently."""
        if any(marker in text for marker in self._markers):
            return True
        if text.isascii():
            return False
        parts = (text[start : start + LOOKED_UP] for start in range(0, len(text), LOOKED_UP))
        return any(self._differs.take(np.frombuffer(part.encode("utf-32-le"), np.uint32)).any() for part in parts)

    def _renew(self, characters: int) -> None:
        self._encoded += characters
        if self._encoded < INTERVAL:
            return
        self._encoded = 0
        resident = _resident()
        if not self._base:
            self._base = resident
        elif resident - self._base > GROWTH:
            self._library = None  # free it first
            self._library = _load(self._settings)
            self._base = 0


def _resident() -> int:
    """Resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _load(settings: str) -> Any:
    from gigatoken.gigatoken_rs import load_hf_json

    return load_hf_json(settings)
