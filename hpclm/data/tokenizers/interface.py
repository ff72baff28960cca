"""What hpclm asks of a tokenizer, and what a person may ask of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpclm.errors import ConfigError

END = "<|endoftext|>"

Batch = tuple[NDArray[np.integer], NDArray[np.int64]]
"""Ids of all texts laid end to end, [t], and the tokens of each text, [texts]."""


@dataclass(frozen=True)
class Options:
    """What is set about a tokenizer besides its kind and its files."""

    eod: str | None = None
    """Text of the end-of-document token; None: the kind's own."""
    extra_ids: int = 0
    """How many <extra_id_N> to append to a sentencepiece model."""

    def __post_init__(self) -> None:
        if self.extra_ids < 0:
            raise ConfigError(f"extra_ids={self.extra_ids} must be at least 0")


DEFAULTS = Options()


class Tokenizer(Protocol):
    """Text to ids and back.

    Your own class is named package.module:Name; it is built with its list of files, and with Options as a second argument
    where data.eod or data.extra_ids is set.
    """

    size: int
    """Entries of the vocabulary: more than every id."""
    eod: int | None
    """Id of the end-of-document token, None where the vocabulary has none."""
    ends_itself: bool
    """Every encoded text ends with ``eod`` already."""
    identity: dict[str, Any]
    """JSON: "kind", "files" {name: blake2b of the content}, "size", "eod", and "options" {name: value} that are not the
    defaults; ``identity`` of this package makes one."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, nothing added but what ``ends_itself`` says."""
        ...

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text; ``flat`` makes this of lists."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text that ``ids`` stand for."""
        ...


def flat(lists: Sequence[Sequence[int]]) -> Batch:
    """Lists of ids as ``encode_batch`` returns them: int32 ids [t], int64 lengths [lists]."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum())), lengths
