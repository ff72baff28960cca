"""Tokenizers with the sentencepiece library, which only this file imports."""

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpclm.base import extras
from hpclm.base.errors import ConfigError
from hpclm.data.tokenizer_folder import FAST, Files, TokenizerFolder
from hpclm.data.tokenizers import Batch, fingerprint, flat
from hpclm.preprocess.tokenizers.huggingface import encoder, of_sentencepiece
from hpclm.preprocess.tokenizers.parameters import Parameters
from hpclm.preprocess.tokenizers.probes import differing
from hpclm.preprocess.tokenizers.vocabulary import expect, id_of_end, load

SENTENCES = 1_000_000  # lines that a model is trained on by default
MIN_SAMPLED_LINES = 101  # minimum number of lines that the library samples from
MAX_LINE_BYTES = 1 << 20  # bytes of a line; the library drops longer ones
PART = 1 << 16  # maximum number of characters of a part of such a line
RESERVED = "\u2585"  # marks unknown characters; the library drops lines that contain it
MAX_OPTION_VALUE = 2**31 - 1  # largest number that the library accepts
ENDS = ("。", "！", "？", "…", ". ", "! ", "? ")
"""Ends of sentences, where long lines are divided."""
USER_DEFINED = 4  # ModelProto.SentencePiece.Type


class SentencePiece:
    """A sentencepiece .model; documents end with its </s>, or with another piece on request."""

    ends_itself = False

    def __init__(self, files: list[str], eod: str | None = None):
        [path] = expect("sentencepiece", files, "x.model")
        self.model = processor("sentencepiece", path)
        self.size = self.model.get_piece_size()
        if eod is None:
            self.eod = self.model.eos_id() if self.model.eos_id() >= 0 else None
        else:
            ids = {self.model.id_to_piece(id): id for id in range(self.size)}
            controls = [piece for piece, id in ids.items() if self.model.is_control(id)]
            angled = [piece for piece in ids if re.fullmatch(r"<[^0].*>", piece) and piece not in controls]
            self.eod = id_of_end("sentencepiece", path, eod, ids, controls + angled)
        unknown = self.model.unk_id()
        self.special_ids = {unknown: self.model.id_to_piece(unknown)}
        self.fingerprint = fingerprint("sentencepiece", files, self.size, self.eod, eod)

    def encode(self, text: str) -> list[int]:
        """Ids of the pieces."""
        return list(self.model.encode(text))

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text, on one thread."""
        try:
            ids = self.model.encode(texts, num_threads=1, out_type="numpy")  # newer versions only; faster
        except (ValueError, RuntimeError):
            return flat(self.model.encode(texts, num_threads=1))
        return np.concatenate(ids or [np.empty(0, np.int32)]), np.fromiter(map(len, ids), np.int64, len(ids))

    def decode(self, ids: list[int]) -> str:
        """The text, without control pieces such as </s>."""
        return str(self.model.decode(ids))

    def token_text(self, id: int) -> str:
        """The text of a piece."""
        return str(self.model.id_to_piece(id))

    def token_id(self, text: str) -> int | None:
        """The id of a piece."""
        id = self.model.piece_to_id(text)
        return int(id) if self.token_text(id) == text else None

    def for_transformers(self, folder: TokenizerFolder) -> Files:
        """A tokenizer.json for a BPE, if it gives the same ids; otherwise the model, for a class that uses the sentencepiece library."""
        model = self.model.serialized_model_proto()
        known = parameters(self)
        if known.kind == "bpe" and known.plain:
            text = of_sentencepiece(known)
            if not differing(self.encode, encoder(text), self):
                # other programs read the model
                return {"tokenizer.json": text.encode(), "tokenizer.model": model}, FAST
        settings: dict[str, Any] = dict(unk_token=self.token_text(self.model.unk_id()), pad_token=None, sep_token=None)
        return {"spiece.model": model}, FAST | {"tokenizer_class": "BertGenerationTokenizer"} | settings


def parameters(tokenizer: SentencePiece) -> Parameters:
    """The parameters of the tokenizer's model."""
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # its classes are created at run time
    proto = messages.ModelProto()
    proto.ParseFromString(tokenizer.model.serialized_model_proto())
    trainer = proto.trainer_spec
    normalizer = proto.normalizer_spec
    whole = any(piece.type == USER_DEFINED for piece in proto.pieces)
    return Parameters(
        trainer.ModelType.Name(trainer.model_type).lower(),
        tuple((piece.piece, piece.score) for piece in proto.pieces),
        tuple(piece.type for piece in proto.pieces),
        tokenizer.model.unk_id(),
        normalizer.precompiled_charsmap,
        normalizer.add_dummy_prefix,
        normalizer.remove_extra_whitespaces,
        trainer.byte_fallback,
        normalizer.escape_whitespaces and not trainer.treat_whitespace_as_suffix and not whole,
    )


def processor(kind: str, path: Path) -> Any:
    """The library's processor for the model at ``path``."""
    with extras.needed_for("a sentencepiece tokenizer"):
        from sentencepiece import SentencePieceProcessor

    return load(kind, [path], lambda: SentencePieceProcessor(model_file=str(path)))


def train_sentencepiece(texts: Iterable[str], kind: str, vocab_size: int, sentences: int = SENTENCES) -> bytes:
    """Train a sentencepiece tokenizer, ``kind`` bpe or unigram, on ``sentences`` random lines of ``texts``; returns its .model.

    Decoding restores the text: no normalisation, and byte fallback. Memory holds the lines. ConfigError if it cannot be trained.
    """
    for option, number, smallest in (("--vocab-size", vocab_size, 1), ("--sentences", sentences, MIN_SAMPLED_LINES)):
        if not smallest <= number <= MAX_OPTION_VALUE:
            raise ConfigError(f"{option} {number} must be from {smallest} to {MAX_OPTION_VALUE} for sentencepiece")
    with extras.needed_for("a sentencepiece tokenizer"):
        from sentencepiece import SentencePieceTrainer, set_random_generator_seed

    set_random_generator_seed(sentences)
    model = io.BytesIO()
    lines = (part for text in texts for line in text.splitlines() for part in parts_of_line(line))
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            input_sentence_size=sentences,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=MAX_LINE_BYTES,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(_explained(str(error), vocab_size)) from None
    return model.getvalue()


def parts_of_line(line: str) -> Iterator[str]:
    """``line`` in parts that the library does not drop: without RESERVED, and of at most MAX_LINE_BYTES.

    A longer line is divided after the last end of a sentence within PART characters, or else at the last space, or else anywhere.
    """
    for text in line.split(RESERVED):
        if 4 * len(text) <= MAX_LINE_BYTES or len(text.encode()) <= MAX_LINE_BYTES:
            if text:
                yield text
            continue
        begin = 0
        while len(text) - begin > PART:
            limit = begin + PART
            cut = max(text.rfind(end, begin, limit) + len(end.rstrip()) for end in ENDS)
            if cut <= begin + 1:
                cut = text.rfind(" ", begin + 1, limit)
            if cut <= begin:
                cut = limit
            yield text[begin:cut]
            begin = cut + text.startswith(" ", cut)  # the library puts one before each line
        if begin < len(text):
            yield text[begin:]


def _explained(error: str, vocab_size: int) -> str:
    """The library's ``error`` from training ``vocab_size`` entries, in terms of hpclm's options."""
    high = re.search(r"Vocabulary size too high \(\d+\).* <= (\d+)", error)
    if high:
        return (
            f"--vocab-size {vocab_size} is too large for this text, which is enough for {high[1]} entries; give --vocab-size "
            f"{high[1]}, or more text"
        )
    low = re.search(r"smaller than required_chars\. \d+ vs (\d+)", error)
    if low:
        return (
            f"--vocab-size {vocab_size} is too small: the 256 bytes, the special entries and the characters of this text need {low[1]} "
            f"entries; give at least --vocab-size {low[1]}"
        )
    if "sentences_.empty()" in error:
        return "no text in the input: all of its lines are empty; give text"
    if "insert_id" in error:
        return f"--vocab-size {vocab_size} is too small: the 256 bytes and the special entries need 259; give more"
    if "train_extremely_large_corpus" in error or "too large" in error:
        return "the text is too long for sentencepiece, which holds it in memory; give fewer --sentences"
    return f"sentencepiece cannot train {vocab_size} entries on this text: {error}"
