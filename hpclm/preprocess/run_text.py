"""Encodes text of a run, with its beginning and end, for all commands.

Text of an imported run is encoded as transformers' AutoTokenizer does, with the tokens that the template adds. Text of any other run is
encoded like the run's data, with nothing added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.config.checks import is_utf8
from hpclm.data import tokenizer_folder
from hpclm.data.tokenizer_folder import TokenizerFolder, first
from hpclm.data.tokenizer_writer import token_id, with_ends
from hpclm.data.tokenizers import Tokenizer
from hpclm.preprocess.tokenizers.huggingface import Library

UNCHANGED: dict[str, Any] = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0, "min_new_tokens": None,
    "num_beams": 1, "sequence_bias": None, "exponential_decay_length_penalty": None, "stop_strings": None, "guidance_scale": None,
}  # fmt: skip
"""Generation settings that would change the most likely text, with the values that have no effect."""


@dataclass(frozen=True)
class RunText:
    """How to encode, begin and end text of a run."""

    tokenizer: Tokenizer
    folder: TokenizerFolder
    """The tokenizer's folder, with the tokens that end a text."""
    vocabulary: int
    """The network's number of entries (model.vocab_size)."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    """Ids that the template adds before and after every text."""

    @property
    def begin(self) -> int | None:
        """The token to put before a text if the template adds no tokens; None if the tokenizer has no such token."""
        named = token_id(self.tokenizer, self.folder.tokens.get("bos_token")) if self.folder.imported else None
        if named is not None:
            return named
        if self.tokenizer.eod is not None:
            return self.tokenizer.eod
        return first(self.folder.ids["bos_token_id"])

    @property
    def ends(self) -> frozenset[int]:
        """All tokens that end a text."""
        return frozenset(self.folder.ends)

    @property
    def generated(self) -> int:
        """Upper bound (exclusive) of the ids that the model may generate. transformers allows an imported model all entries."""
        return self.vocabulary if self.folder.imported else self.tokenizer.size

    @property
    def hidden(self) -> frozenset[int]:
        """Special tokens that do not belong to an answer."""
        texts = [self.folder.tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")]
        if isinstance(self.tokenizer, Library):
            texts += self.tokenizer.special
        ids = [self.tokenizer.eod, *(token_id(self.tokenizer, text) for text in texts)]
        return frozenset(id for id in ids if id is not None)

    def encode(self, text: str, template: bool | None = None) -> list[int]:
        """The ids of ``text``. ``template``: whether to add the template's tokens; None: unless the text already begins with them.

        ConfigError if the model has no such tokens.
        """
        if not is_utf8(text):
            raise ConfigError(f"the text {text[:80]!r} holds half a character (a lone surrogate)")
        ids = list(self.tokenizer.encode(text))
        if getattr(self.tokenizer, "ends_itself", False):  # a text to continue has not ended
            while ids and ids[-1] == self.tokenizer.eod:
                ids.pop()
        if ids and max(ids) >= self.vocabulary:
            raise ConfigError(f"the tokenizer gives id {max(ids)}, but the run's model.vocab_size is {self.vocabulary}")
        if template is None:
            template = not (self.before and text.startswith(self.decode([self.before[0]])))
        return [*self.before, *ids, *self.after] if template else ids

    def start(self, text: str) -> list[int]:
        """The ids of ``text`` for a model to continue; ConfigError without any."""
        ids = self.encode(text)
        if not ids and self.begin is None:
            raise ConfigError("the prompt is empty, and the tokenizer has no end-of-document token to start from")
        return ids or [self.begin]  # type: ignore[list-item]

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """The text of ``ids``, with or without special tokens."""
        hidden = frozenset() if special else self.hidden
        # a network may have more entries than its tokenizer; they have no text
        return self.tokenizer.decode([id for id in ids if id < self.tokenizer.size and id not in hidden])


def of_run(run: Path, data: DataConfig, vocabulary: int) -> RunText:
    """The text settings of the run in the directory ``run``. ``vocabulary``: its model.vocab_size."""
    return of_folder(tokenizer_folder.of_run(run, data), vocabulary)


def of_folder(folder: TokenizerFolder, vocabulary: int, tokenizer: Tokenizer | None = None) -> RunText:
    """The text settings of a network with ``vocabulary`` entries. ``tokenizer``: the folder's, if already built."""
    if tokenizer is None:
        tokenizer = folder.build()
    template: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if folder.imported and isinstance(tokenizer, Library):
        template = tokenizer.template()
    return RunText(tokenizer, with_ends(folder, tokenizer), vocabulary, *template)


def without_effect(generation: Mapping[str, Any]) -> list[str]:
    """The generation settings, as name=value, that hpclm ignores although they would change the most likely text."""
    return [f"{name}={value}" for name, value in generation.items() if name in UNCHANGED and _changes(name, value)]


def _changes(name: str, value: Any) -> bool:
    return value not in (None, UNCHANGED[name], [], {})
