"""fairseq's dictionaries as tokenizers, and how to create one from text.

Source: facebookresearch/fairseq fairseq/data/dictionary.py and fairseq/tokenizer.py.
"""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from hpclm.base.errors import ConfigError
from hpclm.base.files import text_reader
from hpclm.data.tokenizers import fingerprint
from hpclm.preprocess.tokenizers import sentencepieces
from hpclm.preprocess.tokenizers.plain import Words
from hpclm.preprocess.tokenizers.vocabulary import expect, only_end

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
EOS = 2
PADDING = 8  # the number of entries is a multiple of it
OVERWRITE = "#fairseq:overwrite"
INTEGER = re.compile(r"\s*[-+]?\d+(_\d+)*\s*")  # as Python's int() accepts


class Fairseq(Words):
    """Words, or pieces of a sentencepiece .model, from a dict.txt; every text ends with </s>."""

    def __init__(self, files: list[str], eod: str | None = None):
        path, *models = expect("fairseq", files, "dict.txt", "x.model", optional=1)
        only_end("fairseq", eod, SPECIALS[EOS])
        symbols, self.ids = read_dictionary(path)
        self.words = dict(enumerate(symbols))
        self.size = len(symbols)
        self.eod = EOS
        self.fingerprint = fingerprint("fairseq", files, self.size, self.eod)
        self.model = sentencepieces.processor("fairseq", models[0]) if models else None

    def encode(self, text: str) -> list[int]:
        """Ids of the words or pieces (or <unk>), and </s>."""
        if self.model is not None:
            text = " ".join(self.model.encode(text, out_type=str))
        return super().encode(text)

    def decode(self, ids: list[int]) -> str:
        """The words separated by spaces, including </s>; or the text of the pieces, without </s>."""
        if self.model is None:
            return super().decode(ids)
        return str(self.model.decode([self.words.get(id, self.unknown) for id in ids]))

    def compiled(self) -> str | None:
        """A tokenizer.json for words; None for pieces, whose ids are not those of their model."""
        return None if self.model else super().compiled()


def read_dictionary(path: Path) -> tuple[list[str], dict[str, int]]:
    """The symbols of a dict.txt by id, and {symbol: id}; ConfigError names an invalid line.

    A line is "symbol count". A duplicate is refused unless #fairseq:overwrite follows its count, which gives it a new id.
    """
    symbols = list(SPECIALS)
    ids = {symbol: id for id, symbol in enumerate(SPECIALS)}
    try:
        with text_reader(path) as file:
            lines = file.readlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"fairseq dictionary {path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        rest = line.rstrip()
        overwrite = rest.endswith(" " + OVERWRITE)
        symbol, _, count = rest.removesuffix(" " + OVERWRITE).rpartition(" ")
        if not symbol or not INTEGER.fullmatch(count):
            raise ConfigError(
                f"fairseq dictionary {path}:{number} contains {rest!r}, not a symbol, a space and a count"
            )
        if symbol in ids and not overwrite:
            raise ConfigError(
                f"fairseq dictionary {path}:{number}: {symbol!r} is a duplicate of id {ids[symbol]}; "
                f"remove one, or end the line with {OVERWRITE} to give it a new id"
            )
        ids[symbol] = len(symbols)
        symbols.append(symbol)
    if len(symbols) == len(SPECIALS):
        raise ConfigError(f"fairseq dictionary {path} contains no symbols")
    return symbols, ids


def dictionary_of(texts: Iterable[str]) -> str:
    """The content of a dict.txt: the words of ``texts`` by descending count, ties in alphabetical order.

    Entries madeupword0000 ... are added until the number of entries, special ones included, is a multiple of 8.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    for special in SPECIALS:
        del counts[special]
    entries = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    words = (f"madeupword{number:04d}" for number in count())
    made_up = (word for word in words if word not in counts)
    while (len(entries) + len(SPECIALS)) % PADDING:
        entries.append((next(made_up), 0))
    return "".join(f"{word} {number}\n" for word, number in entries)
