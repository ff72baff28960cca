"""Tokenizers with Hugging Face's tokenizers library, which only this file imports: BPE, WordPiece, any tokenizer.json."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.base.files import read_bytes, read_text, text_reader
from hpclm.data.tokenizer_folder import FAST, Files, TokenizerFolder
from hpclm.data.tokenizers import END, Batch, fingerprint, flat
from hpclm.preprocess.tokenizers import gigatokens, span_tokens
from hpclm.preprocess.tokenizers.parameters import Parameters
from hpclm.preprocess.tokenizers.span_tokens import Marked
from hpclm.preprocess.tokenizers.vocabulary import expect, id_of_end, load, vocabulary

log = logging.getLogger("hpclm")
SPACE = "\u2581"  # sentencepiece's space
RANDOM = {"dropout": None, "alpha": None, "nbest_size": None}
"""Attributes that make the library's models sample among the encodings of a text (BPE dropout, Provilkov et al. 2020; subword
regularization, Kudo 2018), and their values without sampling."""
LONGEST_WORD = 1024  # characters
LONG_WORD = re.compile(rf"[^\W\d_]{{{LONGEST_WORD + 1},}}|\d{{{LONGEST_WORD + 1},}}|[^\w\s]{{{LONGEST_WORD + 1},}}")
PROBE = "The quick brown fox, 12 times."


class Library:
    """Base of all kinds that use the library, on one thread; ``model`` is its Tokenizer.

    A byte-level BPE like GPT-2's is encoded by ``fast``, with gigatoken and the same ids.
    """

    ends_itself = False

    def __init__(
        self, kind: str, files: list[str], eod: str | None, make: Callable[[], Any], ends: Iterable[str], hinted: str
    ):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers determines the number of cores
        self.model = load(kind, [Path(file) for file in files], make)
        ids: dict[str, int] = self.model.get_vocab()
        self.size = max(ids.values(), default=-1) + 1
        if eod is None:
            self.eod = next((ids[word] for word in ends if word in ids), None)
        else:
            self.eod = id_of_end(kind, Path(files[0]), eod, ids, (word for word in ids if word.startswith(hinted)))
        self.fingerprint = fingerprint(kind, files, self.size, self.eod, eod)
        settings = bare(self.model)
        tokens = self.model.get_added_tokens_decoder().values()
        self.added = tuple(token.content for token in tokens)
        self.special = tuple(token.content for token in tokens if token.special)
        self._ids_of_special = {text: ids[text] for text in self.special}
        unknown = getattr(self.model.model, "unk_token", None)  # a Unigram model has an id instead
        named = {*self.special, unknown} & ids.keys()
        self.special_ids = {ids[text]: text for text in sorted(named)}
        self.fast = gigatokens.faster(settings, self.exact, [*self.added]) if settings else None

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without the special tokens of a template."""
        return self.fast.encode(text) if self.fast else self.exact([text])[0].tolist()

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text."""
        return self.fast.encode_batch(texts) if self.fast else self.exact(texts)

    def exact(self, texts: list[str]) -> Batch:
        """``encode_batch`` with the tokenizers library."""
        with _panics():
            return flat([encoding.ids for encoding in self.model.encode_batch_fast(texts, add_special_tokens=False)])

    def marked(self, text: str, spans: list[tuple[int, int]]) -> Marked:
        """Ids of ``text``, and whether each has characters in one of ``spans``."""
        with _panics():
            return span_tokens.marked(self.model, self._ids_of_special, text, spans)

    def template(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that the template of its tokenizer.json adds before and after a text; other kinds have no template."""
        with _panics():
            whole = self.model.encode(PROBE, add_special_tokens=True).ids
            plain = self.model.encode(PROBE, add_special_tokens=False).ids
        starts = (place for place in range(len(whole) - len(plain) + 1) if whole[place : place + len(plain)] == plain)
        begin = next(starts)  # a template that changes the ids of the text was refused
        return tuple(whole[:begin]), tuple(whole[begin + len(plain) :])

    def decode(self, ids: list[int]) -> str:
        """The text, including special tokens."""
        with _panics():
            return str(self.model.decode(ids, skip_special_tokens=False))

    def compiled(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return str(self.model.to_str(pretty=True))

    def for_transformers(self, folder: TokenizerFolder) -> Files:
        """The files that transformers reads."""
        return {"tokenizer.json": self.compiled().encode()}, FAST

    def token_text(self, id: int) -> str | None:
        """The text of an entry."""
        text: str | None = self.model.id_to_token(id)
        return text

    def token_id(self, text: str) -> int | None:
        """The id of an entry."""
        id: int | None = self.model.token_to_id(text)
        return id


class GPT2(Library):
    """GPT-2's byte-level BPE: vocab.json and merges.txt; a document ends with <|endoftext|>.

    As in Megatron, <|endoftext|> inside a text is encoded as ordinary characters, so no text can end a document.
    """

    def __init__(self, files: list[str], eod: str | None = None):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocab, merges = expect("gpt2", files, "vocab.json", "merges.txt")
        vocabulary("gpt2", vocab, pre_tokenizers.ByteLevel.alphabet())

        def make() -> Any:
            model = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
            model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            model.decoder = decoders.ByteLevel()
            return model

        super().__init__("gpt2", files, eod, make, [END], "<|")

    def for_transformers(self, folder: TokenizerFolder) -> Files:
        """Also with vocab.json and merges.txt."""
        whole, settings = super().for_transformers(folder)
        vocab, merges = map(read_bytes, folder.files)
        return whole | {"vocab.json": vocab, "merges.txt": merges}, settings


class TokenizerJson(Library):
    """Any tokenizer.json, without its truncation, padding, sampling and template; a document ends with <|endoftext|> or </s>."""

    def __init__(self, files: list[str], eod: str | None = None):
        from tokenizers import Tokenizer

        [path] = expect("json", files, "tokenizer.json")

        def make() -> Any:
            model = Tokenizer.from_file(str(path))
            report_switched_off(str(path), tuple(switch_off(model)))
            return model

        super().__init__("json", files, eod, make, [END, "</s>"], "<")
        wrong = changed_by_template(self.model)
        if wrong:
            raise ConfigError(f"tokenizer json: {path}: {wrong}")

    def for_transformers(self, folder: TokenizerFolder) -> Files:
        """The file itself; only an imported one keeps its template, and the sentencepiece model beside it, which a GGUF file needs."""
        path = Path(folder.files[0])
        if not folder.imported:
            return {"tokenizer.json": without_template(read_text(path)).encode()}, FAST
        models = (path.with_name(name) for name in ("tokenizer.model", "spiece.model"))
        return {"tokenizer.json": read_bytes(path)} | {
            model.name: read_bytes(model) for model in models if model.is_file()
        }, FAST


def switch_off(model: Any) -> list[str]:
    """Switch off features that would randomise, cut or lengthen the ids of a text. Returns their descriptions.

    All other parts of a tokenizer.json (normalizers, pre-tokenizers, models and their caches) are functions of the text.
    """
    off = []
    for name, default in RANDOM.items():
        value = getattr(model.model, name, default)
        if value:
            setattr(model.model, name, default)
            off.append(f"model.{name}={value:g}, which draws ids at random")
    if model.truncation:
        off.append(f"truncation to {model.truncation['max_length']} tokens")
        model.no_truncation()
    if model.padding:
        off.append("padding")
        model.no_padding()
    return off


@cache
def report_switched_off(path: str, off: tuple[str, ...]) -> None:
    """Log once which features of a tokenizer.json are off. Worker processes log nothing, because their parent does."""
    if off and parent_process() is None:
        log.warning("%s: switched off, so that a text always has the same ids: %s", path, "; ".join(off))


def changed_by_template(model: Any) -> str | None:
    """The fault of a template that changes ids even without its special tokens; None for other templates."""
    template = model.post_processor
    with _panics():
        processed = model.encode(PROBE, add_special_tokens=False).ids
        model.post_processor = None
        plain = model.encode(PROBE, add_special_tokens=False).ids
        model.post_processor = template
    if processed == plain:
        return None
    return f"its post_processor turns the {len(plain)} tokens of a text into {len(processed)}; it must contain a text once, unchanged"


class WordPiece(Library):
    """BERT's cased tokenizer: vocab.txt, with a word or ##piece per line; a document ends with [SEP].

    As in Megatron, special tokens inside a text are encoded as ordinary characters. Source: google-research/bert tokenization.py,
    BasicTokenizer and WordpieceTokenizer.
    """

    kind = "wordpiece"
    lower = False

    def __init__(self, files: list[str], eod: str | None = None):
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        [path] = expect(self.kind, files, "vocab.txt")
        ids = _lines(self.kind, path)

        def make() -> Any:
            model = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
            model.normalizer = normalizers.BertNormalizer(lowercase=self.lower)
            model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            model.decoder = decoders.WordPiece()
            return model

        super().__init__(self.kind, files, eod, make, ["[SEP]"], "[")


class WordPieceLower(WordPiece):
    """BERT's uncased tokenizer, which also strips accents."""

    kind = "wordpiece_lower"
    lower = True


def bare(model: Any) -> str | None:
    """The tokenizer.json of ``model`` without added tokens if it is a byte-level BPE like GPT-2's; otherwise None."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    bpe = model.model
    splitter = model.pre_tokenizer
    like_gpt2 = (
        type(bpe) is models.BPE
        and type(splitter) is pre_tokenizers.ByteLevel
        and model.normalizer is None
        and splitter.use_regex
        and not splitter.add_prefix_space
        and not bpe.dropout
        and not bpe.continuing_subword_prefix
        and not bpe.end_of_word_suffix
        and not bpe.byte_fallback
        and not bpe.ignore_merges
        and all(bpe.token_to_id(byte) is not None for byte in pre_tokenizers.ByteLevel.alphabet())
    )
    if not like_gpt2:
        return None
    plain = Tokenizer(bpe)
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return str(plain.to_str())


def of_sentencepiece(bpe: Parameters) -> str:
    """The tokenizer.json equivalent to a sentencepiece BPE."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    ids = {piece: id for id, (piece, _) in enumerate(bpe.pieces)}
    unknown = bpe.pieces[bpe.unknown][0]
    model = Tokenizer(models.BPE(ids, _merges(bpe), unk_token=unknown, fuse_unk=True, byte_fallback=bpe.bytes))
    # Precompiled omits this one composition of NFKC
    composed = normalizers.Replace("\u017f\u0307", "\u1e61")
    steps: list[Any] = []
    if bpe.charsmap:
        steps += [composed, normalizers.Precompiled(bpe.charsmap)]
    if bpe.squeezed:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if bpe.prefix:
        steps.append(normalizers.Prepend(SPACE))
    model.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    parts: list[Any] = [decoders.Replace(SPACE, " ")]
    if bpe.bytes:
        parts.append(decoders.ByteFallback())
    parts.append(decoders.Fuse())
    if bpe.prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    model.decoder = decoders.Sequence(parts)
    return str(model.to_str(pretty=True))


def _merges(bpe: Parameters) -> list[tuple[str, str]]:
    """The merges of a sentencepiece BPE in order: all pairs of pieces that form another piece, by its score."""
    ids = {piece: id for id, (piece, _) in enumerate(bpe.pieces)}
    merges = []
    for piece, score in bpe.pieces:
        for cut in range(1, len(piece)):
            left = piece[:cut]
            right = piece[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def alike(one: str, other: str) -> bool:
    """Whether two tokenizer.json are equal except for formatting, truncation and padding; ConfigError if one cannot be read."""
    from tokenizers import Tokenizer

    models = [load("json", [Path("tokenizer.json")], partial(Tokenizer.from_str, text)) for text in (one, other)]
    for model in models:
        model.no_truncation()
        model.no_padding()
    return bool(models[0].to_str() == models[1].to_str())


def without_template(text: str) -> str:
    """A tokenizer.json with a template that adds nothing to a text."""
    from tokenizers import Tokenizer

    model = Tokenizer.from_str(text)
    if not model.num_special_tokens_to_add(False):
        return text
    model.post_processor = None
    return str(model.to_str(pretty=True))


def encoder(text: str) -> Callable[[str], list[int]]:
    """A function from text to ids, from a tokenizer.json without its truncation, padding and template."""
    from tokenizers import Tokenizer

    model = Tokenizer.from_str(text)
    model.no_truncation()
    model.no_padding()

    def encode(document: str) -> list[int]:
        with _panics():
            return list(model.encode(document, add_special_tokens=False).ids)

    return encode


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a byte-level BPE on ``texts`` with at most ``vocab_size`` entries; returns its tokenizer.json. Id 0 is <|endoftext|>."""
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
    model.train_from_iterator(with_words_divided(texts), trainer)
    return bytes(model.to_str(pretty=True), "utf-8")


def with_words_divided(texts: Iterable[str]) -> Iterator[str]:
    """``texts``, divided within words of more than LONGEST_WORD characters, on which training would take hours.

    Such words are runs of letters, digits or other signs, as the byte-level BPE divides text; Chinese without punctuation is one.
    """
    for text in texts:
        begin = 0
        for word in LONG_WORD.finditer(text):
            for cut in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
                yield text[begin:cut]
                begin = cut
        yield text[begin:]


@contextmanager
def _panics() -> Iterator[None]:
    """ConfigError if the library panics, as it does for a text on which a pattern of tokenizer.json takes too long."""
    try:
        yield
    except BaseException as error:  # PanicException is not an Exception, and has no public name
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"the tokenizer fails on a text: {error}; look at the patterns in its tokenizer.json"
        ) from None


def _lines(kind: str, path: Path) -> dict[str, int]:
    """{line: its number from 0} of a vocab.txt; the last number for duplicates."""
    try:
        with text_reader(path) as file:
            ids = {line.rstrip("\n"): id for id, line in enumerate(file)}
    except UnicodeDecodeError as error:
        raise ConfigError(f"tokenizer {kind}: {path} is not UTF-8: {error}") from None
    if "[UNK]" not in ids:
        raise ConfigError(f"tokenizer {kind}: {path} has no line [UNK], the token for unknown words")
    return ids
