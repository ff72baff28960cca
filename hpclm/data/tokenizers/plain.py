"""The tokenizers that need no library: bytes, and words between white space."""

import numpy as np

from hpclm.data.tokenizers.files import expect, named_end, no_extra_ids, only_end, vocabulary
from hpclm.data.tokenizers.identities import identity
from hpclm.data.tokenizers.interface import DEFAULTS, END, Batch, Options, flat


class Bytes:
    """The bytes of UTF-8, and 256 for the end of a document."""

    ends_itself = False

    def __init__(self, files: list[str], options: Options = DEFAULTS):
        expect("bytes", files)
        no_extra_ids("bytes", options)
        only_end("bytes", options, END)
        self.size, self.eod = 257, 256
        self.identity = identity("bytes", files, self.size, self.eod, DEFAULTS)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text."""
        raw = [text.encode() for text in texts]
        return np.frombuffer(b"".join(raw), np.uint8), np.fromiter(map(len, raw), np.int64, len(raw))

    def decode(self, ids: list[int]) -> str:
        """The text; a broken character becomes U+FFFD."""
        raw = b"".join(END.encode() if id == self.eod else bytes([id]) for id in ids)
        return raw.decode(errors="replace")


class Whitespace:
    """Words between white space, looked up in a vocab.json {word: id}; every text ends with the end-of-document token."""

    ends_itself = True

    def __init__(self, files: list[str], options: Options = DEFAULTS):
        [path] = expect("whitespace", files, "vocab.json")
        no_extra_ids("whitespace", options)
        self.ids = vocabulary("whitespace", path, ["<unk>", *([END] if options.eod is None else [])])
        named = named_end("whitespace", path, options, self.ids, [word for word in self.ids if word.startswith("<")])
        self.words = {id: word for word, id in self.ids.items()}
        self.size, self.eod = max(self.words) + 1, self.ids[END] if named is None else named
        self.identity = identity("whitespace", files, self.size, self.eod, options)

    def encode(self, text: str) -> list[int]:
        """Ids of the words, <unk> for unknown ones, and the end of the document."""
        unknown = self.ids["<unk>"]
        return [*(self.ids.get(word, unknown) for word in text.split()), self.eod]

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text."""
        return flat([self.encode(text) for text in texts])

    def decode(self, ids: list[int]) -> str:
        """The words with single spaces between them."""
        return " ".join(self.words.get(id, "<unk>") for id in ids)
