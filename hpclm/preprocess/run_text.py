"""Encodes text of a run, with its beginning and end, for all commands and exports.

Text of an imported run is encoded as transformers' AutoTokenizer does, with the tokens that the template adds. Text of any other run is
encoded like the run's data, with nothing added.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.config.checks import is_utf8
from hpclm.data import chat_record, tokenizers
from hpclm.data.chat_record import ChatRecord
from hpclm.data.tokenizers import Tokenizer
from hpclm.preprocess import special_tokens
from hpclm.preprocess.tokenizers.huggingface import Library
from hpclm.preprocess.tokenizers.sentencepieces import SentencePiece

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
    imported_tokens: Mapping[str, Any]
    """Special tokens of an imported run, from its special_tokens.json."""
    imported: bool
    vocabulary: int
    """The network's number of entries (model.vocab_size)."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    """Ids that the template adds before and after every text."""
    chat: ChatRecord | None = None
    """The chat settings that the run was tuned with."""

    @property
    def ids(self) -> dict[str, Any]:
        """Special tokens, in the form of a config.json."""
        answer_ends: Collection[int] = ()
        begin = None
        if self.chat:
            answer_ends = self.chat.ends.values()
            begin = token_id(self.tokenizer, self.chat.named.get("bos_token"))
        end = self.tokenizer.eod
        ids = special_tokens.ids(self.imported_tokens, end, token_text(self.tokenizer, end), answer_ends)
        if begin is None and not self.imported:  # the token that ends a document begins the next
            begin = self.tokenizer.eod
        if begin is None and ids["bos_token_id"] is None:
            begin = token_id(self.tokenizer, self.imported_tokens.get("bos_token"))
        if begin is not None:
            ids["bos_token_id"] = begin
        return ids

    @property
    def begin(self) -> int | None:
        """The token to put before a text if the template adds no tokens; None if the tokenizer has no such token."""
        named = token_id(self.tokenizer, self.imported_tokens.get("bos_token"))
        if named is not None:
            return named
        if self.tokenizer.eod is not None:
            return self.tokenizer.eod
        return special_tokens.first(self.ids["bos_token_id"])

    @property
    def ends(self) -> frozenset[int]:
        """All tokens that end a text."""
        return frozenset(special_tokens.listed(self.ids["eos_token_id"]))

    @property
    def generated(self) -> int:
        """Upper bound (exclusive) of the ids that the model may generate. transformers allows an imported model all entries."""
        return self.vocabulary if self.imported else self.tokenizer.size

    @property
    def hidden(self) -> frozenset[int]:
        """Special tokens that do not belong to an answer."""
        texts = [self.imported_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")]
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


def of_run(run: Path, data: DataConfig, vocabulary: int, tokenizer: Tokenizer | None = None) -> RunText:
    """The text settings of the run in the directory ``run``. ``vocabulary``: its model.vocab_size; ``tokenizer``: the run's, if already
    built."""
    if tokenizer is None:
        tokenizer = tokenizers.of_run(data)
    imported_tokens = special_tokens.of_run(run, tokenizers.files_of_run(data))
    template: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if imported_tokens is not None and isinstance(tokenizer, Library):
        template = tokenizer.template()
    return RunText(
        tokenizer,
        imported_tokens or {},
        imported_tokens is not None,
        vocabulary,
        *template,
        chat=chat_record.of_run(run),
    )


def without_effect(generation: Mapping[str, Any]) -> list[str]:
    """The generation settings, as name=value, that hpclm ignores although they would change the most likely text."""
    return [f"{name}={value}" for name, value in generation.items() if name in UNCHANGED and _changes(name, value)]


def _changes(name: str, value: Any) -> bool:
    return value not in (None, UNCHANGED[name], [], {})


def token_text(tokenizer: Tokenizer, id: int | None) -> str | None:
    """The text of a token in its vocabulary, or None."""
    if id is None or id >= tokenizer.size:
        return None
    if isinstance(tokenizer, SentencePiece):
        return str(tokenizer.model.id_to_piece(id))
    return tokenizer.model.id_to_token(id) if isinstance(tokenizer, Library) else None


def token_id(tokenizer: Tokenizer, text: str | None) -> int | None:
    """The id of the token with this ``text`` in the vocabulary, or None."""
    if text is None:
        return None
    if isinstance(tokenizer, SentencePiece):
        id = tokenizer.model.piece_to_id(text)
        return int(id) if tokenizer.model.id_to_piece(id) == text else None
    return tokenizer.model.token_to_id(text) if isinstance(tokenizer, Library) else None
