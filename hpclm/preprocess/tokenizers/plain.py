"""Tokenizers without a library: bytes, and words separated by white space."""

import numpy as np

from hpclm.data.tokenizers import END, Batch, fingerprint, flat
from hpclm.preprocess.tokenizers.vocabulary import expect, id_of_end, only_end, vocabulary


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
