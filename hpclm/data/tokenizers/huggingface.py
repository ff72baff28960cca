"""Tokenizers of the Hugging Face tokenizers library, which only this file imports: BPE, WordPiece, any tokenizer.json."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hpclm.data.tokenizers import gigatokens
from hpclm.data.tokenizers.files import expect, load, named_end, no_extra_ids, vocabulary
from hpclm.data.tokenizers.identities import identity
from hpclm.data.tokenizers.interface import DEFAULTS, END, Batch, Options, flat
from hpclm.errors import ConfigError


class Library:
    """Shared by the kinds that run on the library, on one thread; ``model`` is its Tokenizer.

    Where the model is a byte-level BPE like GPT-2's, ``fast`` encodes: gigatoken, with the same ids.
    """

    ends_itself = False

    def __init__(
        self, kind: str, files: list[str], options: Options, make: Callable[[], Any], ends: Iterable[str], hinted: str
    ):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers says how many cores to use
        no_extra_ids(kind, options)
        self.model = load(kind, [Path(file) for file in files], make)
        ids: dict[str, int] = self.model.get_vocab()
        self.size = max(ids.values(), default=-1) + 1
        named = named_end(kind, Path(files[0]), options, ids, [word for word in ids if word.startswith(hinted)])
        self.eod = next((ids[word] for word in ends if word in ids), None) if named is None else named
        self.identity = identity(kind, files, self.size, self.eod, options)
        settings = bare(self.model)
        added = [token.content for token in self.model.get_added_tokens_decoder().values()]
        self.fast = gigatokens.faster(settings, self.exact, added) if settings else None

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without a template's special tokens."""
        return self.fast.encode(text) if self.fast else self.exact([text])[0].tolist()

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text."""
        return self.fast.encode_batch(texts) if self.fast else self.exact(texts)

    def exact(self, texts: list[str]) -> Batch:
        """``encode_batch`` by the tokenizers library itself."""
        return flat([found.ids for found in self.model.encode_batch_fast(texts, add_special_tokens=False)])

    def decode(self, ids: list[int]) -> str:
        """The text, special tokens spelled out."""
        return str(self.model.decode(ids, skip_special_tokens=False))


class GPT2(Library):
    """GPT-2's byte-level BPE: vocab.json and merges.txt; a document ends with <|endoftext|>.

    As in Megatron, <|endoftext|> inside a text is ordinary characters: no text can fake the end of a document.
    """

    def __init__(self, files: list[str], options: Options = DEFAULTS):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocab, merges = expect("gpt2", files, "vocab.json", "merges.txt")
        vocabulary("gpt2", vocab, pre_tokenizers.ByteLevel.alphabet())

        def make() -> Any:
            model = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
            model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            model.decoder = decoders.ByteLevel()
            return model

        super().__init__("gpt2", files, options, make, [END], "<|")


class TokenizerJson(Library):
    """Any tokenizer.json, with neither its truncation, nor its padding, nor its template; ends with <|endoftext|> or </s>."""

    def __init__(self, files: list[str], options: Options = DEFAULTS):
        from tokenizers import Tokenizer

        [path] = expect("json", files, "tokenizer.json")

        def make() -> Any:
            model = Tokenizer.from_file(str(path))
            model.no_truncation()
            model.no_padding()
            return model

        super().__init__("json", files, options, make, [END, "</s>"], "<")


class WordPiece(Library):
    """BERT's tokenizer, which keeps case: vocab.txt, a word or ##piece a line; a document ends with [SEP].

    As in Megatron, [SEP] and the like inside a text are ordinary characters.
    Source: google-research/bert tokenization.py, BasicTokenizer and WordpieceTokenizer.
    """

    kind, lower = "wordpiece", False

    def __init__(self, files: list[str], options: Options = DEFAULTS):
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        [path] = expect(self.kind, files, "vocab.txt")
        ids = _lines(self.kind, path)

        def make() -> Any:
            model = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
            model.normalizer = normalizers.BertNormalizer(lowercase=self.lower)
            model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            model.decoder = decoders.WordPiece()
            return model

        super().__init__(self.kind, files, options, make, ["[SEP]"], "[")


class WordPieceLower(WordPiece):
    """BERT's tokenizer, which lowers case and strips accents: vocab.txt; a document ends with [SEP]."""

    kind, lower = "wordpiece_lower", True


def bare(model: Any) -> str | None:
    """The tokenizer.json of ``model`` without its added tokens, if it is a byte-level BPE just like GPT-2's; else None."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    bpe, words = model.model, model.pre_tokenizer
    like_gpt2 = (
        type(bpe) is models.BPE
        and type(words) is pre_tokenizers.ByteLevel
        and model.normalizer is None
        and words.use_regex
        and not words.add_prefix_space
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


def _lines(kind: str, path: Path) -> dict[str, int]:
    """{line: its number from 0} of a vocab.txt; of a word that comes twice, the last."""
    try:
        with path.open(encoding="utf-8") as file:
            ids = {line.rstrip("\n"): id for id, line in enumerate(file)}
    except UnicodeDecodeError as error:
        raise ConfigError(f"tokenizer {kind}: {path} is not UTF-8: {error}") from None
    if "[UNK]" not in ids:
        raise ConfigError(f"tokenizer {kind}: {path} has no line [UNK], which stands for unknown words")
    return ids
