"""Tokenizers without a library: bytes, and words separated by white space."""

import json
from typing import Any

import numpy as np

from hpclm.data.tokenizer_folder import FAST, Files, TokenizerFolder
from hpclm.data.tokenizers import END, Batch, fingerprint, flat
from hpclm.preprocess.tokenizers.vocabulary import expect, id_of_end, only_end, vocabulary

WHITE_SPACE = r"[\s\x1c-\x1f]+"
"""The characters at which str.split() divides a text, as a pattern of Oniguruma."""


class Bytes:
    """UTF-8 bytes, with 256 as the end-of-document token."""

    ends_itself = False

    def __init__(self, files: list[str], eod: str | None = None):
        expect("bytes", files)
        only_end("bytes", eod, END)
        self.size = 257
        self.eod = 256
        self.fingerprint = fingerprint("bytes", files, self.size, self.eod)

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of ``text``."""
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text."""
        raw = [text.encode() for text in texts]
        return np.frombuffer(b"".join(raw), np.uint8), np.fromiter(map(len, raw), np.int64, len(raw))

    def decode(self, ids: list[int]) -> str:
        """The text; invalid UTF-8 becomes U+FFFD."""
        raw = b"".join(END.encode() if id == self.eod else bytes([id]) for id in ids)
        return raw.decode(errors="replace")

    def compiled(self) -> str:
        """A tokenizer.json with the same ids: a byte-level BPE without merges."""
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = iter(range(256, 512))
        letters = [chr(byte if byte in shown else next(others)) for byte in range(256)]  # as GPT-2 writes bytes
        vocab = {text: id for id, text in enumerate([*letters, END])}
        steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        model = {"type": "BPE", "vocab": vocab, "merges": []}
        return _tokenizer_json(model, steps, steps)

    def for_transformers(self, folder: TokenizerFolder) -> Files:
        """The files that transformers reads."""
        return {"tokenizer.json": self.compiled().encode()}, FAST

    def token_text(self, id: int) -> str | None:
        """The text of the end-of-document token; bytes have none."""
        return END if id == self.eod else None


class Words:
    """Words separated by white space, looked up in a vocabulary; every text ends with the end-of-document token.

    ``ids``: by word; ``words``: by id; ``unknown``: replaces words that are not in the vocabulary.
    """

    ends_itself = True
    ids: dict[str, int]
    words: dict[int, str]
    unknown = "<unk>"
    eod: int

    @property
    def special_ids(self) -> dict[int, str]:
        """The unknown token."""
        return {self.ids[self.unknown]: self.unknown}

    def encode(self, text: str) -> list[int]:
        """Ids of the words (or <unk>), and the end-of-document token."""
        unknown = self.ids[self.unknown]
        return [*(self.ids.get(word, unknown) for word in text.split()), self.eod]

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text."""
        return flat([self.encode(text) for text in texts])

    def decode(self, ids: list[int]) -> str:
        """The words separated by spaces."""
        return " ".join(self.words.get(id, self.unknown) for id in ids)

    def compiled(self) -> str | None:
        """A tokenizer.json with the same ids, but without the end of a text."""
        model = {"type": "WordLevel", "vocab": self.ids, "unk_token": self.unknown}
        split = {"type": "Split", "pattern": {"Regex": WHITE_SPACE}, "behavior": "Removed", "invert": False}
        return _tokenizer_json(model, split, None)

    def for_transformers(self, folder: TokenizerFolder) -> Files:
        """The files that transformers reads."""
        text = self.compiled()
        return ({}, {}) if text is None else ({"tokenizer.json": text.encode()}, FAST)

    def token_text(self, id: int) -> str | None:
        """A word."""
        return self.words.get(id)

    def token_id(self, text: str) -> int | None:
        """The id of a word."""
        return self.ids.get(text)


class Whitespace(Words):
    """Words of a vocab.json {word: id}."""

    def __init__(self, files: list[str], eod: str | None = None):
        [path] = expect("whitespace", files, "vocab.json")
        needed = ["<unk>"]
        if eod is None:
            needed.append(END)
        self.ids = vocabulary("whitespace", path, needed)
        self.words = {id: word for word, id in self.ids.items()}
        self.size = max(self.words) + 1
        angled = (word for word in self.ids if word.startswith("<"))
        self.eod = id_of_end("whitespace", path, END if eod is None else eod, self.ids, angled)
        self.fingerprint = fingerprint("whitespace", files, self.size, self.eod, eod)


def _tokenizer_json(model: dict[str, Any], splitter: dict[str, Any], decoder: dict[str, Any] | None) -> str:
    """A tokenizer.json of this ``model``, without added tokens."""
    parts: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    parts |= {"normalizer": None, "pre_tokenizer": splitter, "post_processor": None, "decoder": decoder, "model": model}
    return json.dumps(parts, indent=2, ensure_ascii=False)
