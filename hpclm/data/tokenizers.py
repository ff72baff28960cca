"""Text to token ids and back, by the libraries and file formats that people have vocabularies in.

The only file that speaks sentencepiece and tokenizers; both are imported when a tokenizer is built. Nothing is downloaded.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from hpclm.config.schema import TOKENIZERS, DataConfig
from hpclm.data.indexed import sidecar
from hpclm.errors import ConfigError
from hpclm.files import readable
from hpclm.registry import lookup

END = "<|endoftext|>"


class Tokenizer(Protocol):
    """What hpclm asks of a tokenizer; your own class is named package.module:Name and built with its list of files."""

    size: int
    """Entries of the vocabulary: more than every id."""
    eod: int | None
    """Id of the end-of-document token, None where the vocabulary has none."""
    identity: dict[str, Any]
    """JSON: "kind", "files" {name: blake2b of the content}, "size", "eod"."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, nothing added."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of each text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text that ``ids`` stand for."""
        ...


def build(kind: str, files: list[str]) -> Tokenizer:
    """The tokenizer ``kind`` (data.tokenizer) made from its ``files``; ConfigError when they do not fit together."""
    made: Tokenizer = lookup("tokenizer", kind, TOKENIZERS)(files)
    return made


def of_run(data: DataConfig) -> Tokenizer:
    """The tokenizer of a run: the one its settings name, or the one its dataset was made with."""
    if data.tokenizer is not None:
        return build(data.tokenizer, data.tokenizer_files)
    note = sidecar(data.prefix) if data.prefix else {}
    if not note:
        raise ConfigError("the run's dataset does not name its tokenizer; set data.tokenizer and data.tokenizer_files")
    paths = note.get("tokenizer_files")
    if not isinstance(paths, list):
        raise ConfigError(f"the note about dataset {data.prefix} names no tokenizer_files; set data.tokenizer")
    tokenizer = build(note["tokenizer"]["kind"], paths)
    if tokenizer.identity != note["tokenizer"]:
        raise ConfigError(
            f"the tokenizer of dataset {data.prefix} has changed: it was {note['tokenizer']}, "
            f"and {', '.join(paths) or 'it'} is now {tokenizer.identity}"
        )
    return tokenizer


class Bytes:
    """The bytes of UTF-8, and 256 for the end of a document."""

    def __init__(self, files: list[str]):
        _expect("bytes", files)
        self.size, self.eod = 257, 256
        self.identity = _identity("bytes", files, self.size, self.eod)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """The text; a broken character becomes U+FFFD."""
        raw = b"".join(END.encode() if id == self.eod else bytes([id]) for id in ids)
        return raw.decode(errors="replace")


class Whitespace:
    """Words between white space, looked up in a vocab.json {word: id}; every text ends with <|endoftext|>."""

    def __init__(self, files: list[str]):
        [path] = _expect("whitespace", files, "vocab.json")
        self.ids = _vocabulary("whitespace", path, ["<unk>", END])
        self.words = {id: word for word, id in self.ids.items()}
        self.size, self.eod = max(self.words) + 1, self.ids[END]
        self.identity = _identity("whitespace", files, self.size, self.eod)

    def encode(self, text: str) -> list[int]:
        """Ids of the words, <unk> for unknown ones, and <|endoftext|>."""
        unknown = self.ids["<unk>"]
        return [*(self.ids.get(word, unknown) for word in text.split()), self.eod]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """The words with single spaces between them."""
        return " ".join(self.words.get(id, "<unk>") for id in ids)


class SentencePiece:
    """A sentencepiece .model; the end of a document is its </s>."""

    def __init__(self, files: list[str]):
        from sentencepiece import SentencePieceProcessor

        [path] = _expect("sentencepiece", files, "x.model")
        self.model = _load("sentencepiece", [path], lambda: SentencePieceProcessor(model_file=str(path)))
        self.size = self.model.get_piece_size()
        self.eod = self.model.eos_id() if self.model.eos_id() >= 0 else None
        self.identity = _identity("sentencepiece", files, self.size, self.eod)

    def encode(self, text: str) -> list[int]:
        """Ids of the pieces."""
        return list(self.model.encode(text))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of each text, on one thread."""
        return list(self.model.encode(texts, num_threads=1))

    def decode(self, ids: list[int]) -> str:
        """The text; control pieces such as </s> are left out."""
        return str(self.model.decode(ids))


class _Fast:
    """Shared by the two kinds that run on the tokenizers library, on one thread; ``model`` is its Tokenizer."""

    def __init__(self, kind: str, files: list[str], load: Callable[[], Any], ends: Iterable[str]):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers says how many cores to use
        self.model = _load(kind, [Path(file) for file in files], load)
        self.size = max(self.model.get_vocab().values(), default=-1) + 1
        found = (self.model.token_to_id(word) for word in ends)
        self.eod: int | None = next((id for id in found if id is not None), None)
        self.identity = _identity(kind, files, self.size, self.eod)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without a template's special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of each text."""
        return [found.ids for found in self.model.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """The text, special tokens spelled out."""
        return str(self.model.decode(ids, skip_special_tokens=False))


class GPT2(_Fast):
    """GPT-2's byte-level BPE: vocab.json and merges.txt.

    As in Megatron, <|endoftext|> inside a text is ordinary characters: no text can fake the end of a document.
    """

    def __init__(self, files: list[str]):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocab, merges = _expect("gpt2", files, "vocab.json", "merges.txt")
        _vocabulary("gpt2", vocab, pre_tokenizers.ByteLevel.alphabet())

        def load() -> Any:
            model = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
            model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            model.decoder = decoders.ByteLevel()
            return model

        super().__init__("gpt2", files, load, [END])


class TokenizerJson(_Fast):
    """Any Hugging Face tokenizer.json, with neither its truncation, nor its padding, nor its template."""

    def __init__(self, files: list[str]):
        from tokenizers import Tokenizer

        [path] = _expect("json", files, "tokenizer.json")

        def load() -> Any:
            model = Tokenizer.from_file(str(path))
            model.no_truncation()
            model.no_padding()
            return model

        super().__init__("json", files, load, [END, "</s>"])


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """The tokenizer.json of a byte-level BPE learned from ``texts``, at most ``vocab_size`` entries; id 0 is <|endoftext|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise ConfigError(f"--vocab-size {vocab_size} must be at least {len(alphabet) + 1}: all bytes, and {END}")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    return bytes(model.to_str(pretty=True), "utf-8")


def train_sentencepiece(texts: Iterable[str], kind: str, vocab_size: int) -> bytes:
    """The .model of a sentencepiece tokenizer, ``kind`` bpe or unigram, learned from the lines of ``texts``.

    Text comes back from its ids unchanged: no normalisation, and bytes for rare characters. All lines are held in memory.
    """
    import io

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
            max_sentence_length=1 << 20,  # bytes; the library's own limit drops longer lines
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(f"sentencepiece cannot learn {vocab_size} entries from this text: {error}") from None
    return model.getvalue()


def _expect(kind: str, files: list[str], *names: str) -> list[Path]:
    """``files`` as readable paths, as many as ``names``."""
    if len(files) != len(names):
        wanted = f"{len(names)} file(s), {' and '.join(names)}" if names else "no files"
        raise ConfigError(
            f"tokenizer {kind} takes {wanted}; given {len(files)}: {', '.join(map(str, files)) or 'none'}"
        )
    return [readable(file, f"{kind} tokenizer's {name}") for file, name in zip(files, names, strict=True)]


def _load(kind: str, paths: list[Path], load: Callable[[], Any]) -> Any:
    """What ``load`` makes of the paths; the libraries raise bare Exception and RuntimeError for files of another kind."""
    try:
        return load()
    except Exception as error:
        names = " and ".join(map(str, paths))
        raise ConfigError(f"tokenizer {kind} cannot use {names}: {error}; is it a file of another kind?") from None


def _vocabulary(kind: str, path: Path, needed: Iterable[str]) -> dict[str, int]:
    """The {word: id} of a vocab.json that has all of ``needed``."""
    try:
        ids = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenizer {kind}: {path} is not JSON: {error}") from None
    if not isinstance(ids, dict) or not all(type(id) is int and id >= 0 for id in ids.values()):
        raise ConfigError(f"tokenizer {kind}: {path} must be a JSON object of words and their ids")
    missing = sorted(set(needed) - set(ids))
    if missing:
        raise ConfigError(f"tokenizer {kind}: {path} lacks {len(missing)} entries it needs, among them {missing[:5]}")
    return ids


def _identity(kind: str, files: list[str], size: int, eod: int | None) -> dict[str, Any]:
    hashes = {Path(file).name: hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest() for file in files}
    return {"kind": kind, "files": hashes, "size": size, "eod": eod}
