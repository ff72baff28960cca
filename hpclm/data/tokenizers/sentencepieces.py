"""Tokenizers with the sentencepiece library, which only this file imports."""

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpclm import extras
from hpclm.data.tokenizers.interface import DEFAULTS, Batch, Options, expect, fingerprint, flat, load, named_end
from hpclm.errors import ConfigError
from hpclm.files import read_bytes

USER_DEFINED = 4  # ModelProto.SentencePiece.Type
EXTRA = "\u2581<extra_id_{}>"
BEFORE_EXTRA = re.compile(r"(?<=[^ ])(?=<extra_id_)")


class SentencePiece:
    """A sentencepiece .model; documents end with its </s>, or with the piece in the options.

    <extra_id_N> are appended as in T5 and mT5: <extra_id_0> has the last id, and includes the space before it. Source: google/seqio seqio/vocabularies.py, SentencePieceVocabulary.
    """

    ends_itself = False

    def __init__(self, files: list[str], options: Options = DEFAULTS):
        [path] = expect("sentencepiece", files, "x.model")
        self.model = processor("sentencepiece", path, options.extra_ids)
        self.size = self.model.get_piece_size()
        self.extra_ids = options.extra_ids
        own = self.model.eos_id() if self.model.eos_id() >= 0 else None
        if options.eod is None:
            self.eod = own
        else:
            pieces = {self.model.id_to_piece(id): id for id in range(self.size)}
            pieces |= {piece[1:]: id for piece, id in pieces.items() if id >= self.size - options.extra_ids}
            controls = [piece for piece, id in pieces.items() if self.model.is_control(id)]
            angled = [piece for piece in pieces if re.fullmatch(r"<[^0].*>", piece) and piece not in controls]
            self.eod = named_end("sentencepiece", path, options, pieces, controls + angled)
        self.fingerprint = fingerprint("sentencepiece", files, self.size, self.eod, options)

    def encode(self, text: str) -> list[int]:
        """Ids of the pieces."""
        return list(self.model.encode(self._spaced(text)))

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text, on one thread."""
        return pieces(self.model, [self._spaced(text) for text in texts] if self.extra_ids else texts)

    def decode(self, ids: list[int]) -> str:
        """The text, without control pieces such as </s>."""
        return str(self.model.decode(ids))

    def _spaced(self, text: str) -> str:
        """``text`` with a space before each <extra_id_N>, because it is part of that piece."""
        return BEFORE_EXTRA.sub(" ", text) if self.extra_ids and "<extra_id_" in text else text


@dataclass(frozen=True)
class Merging:
    """The parameters of a sentencepiece BPE."""

    pieces: tuple[tuple[str, float], ...]
    """Text and score of every piece, by id; pairs that form the piece with the highest score are merged first."""
    unknown: int
    """Id of <unk>."""
    charsmap: bytes
    """Compiled normalisation rules; empty: none."""
    prefix: bool
    """Whether a space is prepended to a text."""
    squeezed: bool
    """Whether spaces are stripped from both ends, and repeated ones merged."""
    bytes: bool
    """Whether unknown characters become byte pieces."""


def merging(tokenizer: SentencePiece) -> Merging | None:
    """The parameters of the tokenizer's model; None if it is not a BPE, or has features that other libraries lack."""
    proto = _message(tokenizer.model.serialized_model_proto())
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    whole = any(piece.type == USER_DEFINED for piece in proto.pieces)  # user-defined pieces are never split
    usual = normalizer.escape_whitespaces and not trainer.treat_whitespace_as_suffix
    if trainer.model_type != trainer.BPE or whole or not usual:
        return None
    return Merging(
        tuple((piece.piece, piece.score) for piece in proto.pieces),
        tokenizer.model.unk_id(),
        normalizer.precompiled_charsmap,
        normalizer.add_dummy_prefix,
        normalizer.remove_extra_whitespaces,
        trainer.byte_fallback,
    )


def processor(kind: str, path: Path, extra_ids: int = 0) -> Any:
    """The library's processor for the model at ``path``, with ``extra_ids`` appended."""
    with extras.needed_for("a sentencepiece tokenizer"):
        from sentencepiece import SentencePieceProcessor

    model = load(kind, [path], lambda: SentencePieceProcessor(model_file=str(path)))
    if not extra_ids:
        return model
    there = [k for k in range(extra_ids) if model.id_to_piece(model.piece_to_id(EXTRA.format(k))) == EXTRA.format(k)]
    if there:
        raise ConfigError(f"{path} already has <extra_id_{there[0]}> and {len(there) - 1} more; leave out extra_ids")
    proto = _message(read_bytes(path))
    for k in reversed(range(extra_ids)):
        proto.pieces.add(piece=EXTRA.format(k), score=0.0, type=USER_DEFINED)
    return SentencePieceProcessor(model_proto=proto.SerializeToString())


def pieces(model: Any, texts: list[str]) -> Batch:
    """Ids of ``texts`` by the library's ``model``, on one thread."""
    try:
        found = model.encode(texts, num_threads=1, out_type="numpy")  # newer versions only; faster
    except (ValueError, RuntimeError):
        return flat(model.encode(texts, num_threads=1))
    lengths = np.fromiter(map(len, found), np.int64, len(found))
    return np.concatenate(found) if found else np.empty(0, np.int32), lengths


def train_sentencepiece(texts: Iterable[str], kind: str, vocab_size: int) -> bytes:
    """Train a sentencepiece tokenizer, ``kind`` bpe or unigram, on the lines of ``texts``; its .model.

    Decoding restores the text: no normalisation, and byte fallback. All lines are in memory.
    """
    with extras.needed_for("a sentencepiece tokenizer"):
        from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    lines: Iterator[str] = (line for text in texts for line in text.splitlines() if line)
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=1 << 20,  # bytes; longer lines are dropped
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(f"sentencepiece cannot train {vocab_size} entries on this text: {error}") from None
    return model.getvalue()


def _message(model: bytes) -> Any:
    """The ModelProto in a .model file."""
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # its classes are created at run time
    proto = messages.ModelProto()
    proto.ParseFromString(model)
    return proto
