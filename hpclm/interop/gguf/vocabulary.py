"""The run's tokenizer for a GGUF file, such that llama.cpp gives the same ids; or the reason why that is impossible.

Source: llama.cpp, src/llama-vocab.cpp.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.data.tokenizer_folder import first
from hpclm.data.tokenizer_writer import token_id, token_text
from hpclm.data.tokenizers import Tokenizer, describe
from hpclm.preprocess.run_text import RunText
from hpclm.preprocess.tokenizers.huggingface import Library
from hpclm.preprocess.tokenizers.plain import Bytes
from hpclm.preprocess.tokenizers.sentencepieces import SentencePiece, parameters

log = logging.getLogger(__name__)
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
"""Types of tokens; sentencepiece numbers the types of its pieces in the same way."""
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MODELS = {"bpe": "llama", "unigram": "t5"}
"""Maps kinds of sentencepiece models to llama.cpp's names."""
SPLITS = {(WORDS % r"\p{N}{1,3}", True): "llama-bpe", (WORDS % r"\p{N}", False): "qwen2"}
"""Maps (pattern that splits a text, whether words that are tokens are never split) to llama.cpp's name."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of tokens that end a text; llama.cpp stops at all of them."""
NO_MERGES = ["\u0100 \u0100"]  # an array must not be empty; no token consists of two zero bytes
MARK = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
"""Marks around the assistant's text in a template, which only transformers reads."""
Keys = dict[str, Any]


def sentencepiece_of(text: RunText) -> SentencePiece | None:
    """The sentencepiece model next to an imported tokenizer.json, if it was made from it; otherwise None."""
    if not (text.folder.imported and isinstance(text.tokenizer, Library)):
        return None
    for path in (Path(text.folder.files[0]).with_name(name) for name in ("tokenizer.model", "spiece.model")):
        if path.is_file():
            try:
                pieces = SentencePiece([str(path)])
            except ConfigError:  # tiktoken files can have this name too
                continue
            if all(token_text(pieces, id) == token_text(text.tokenizer, id) for id in range(pieces.size)):
                return pieces
    return None


def keys(text: RunText, pieces: SentencePiece | None) -> Keys:
    """The file's keys for the tokenizer of ``text``, without the prefix "tokenizer.". ConfigError if llama.cpp would give other ids.

    ``pieces``: see ``sentencepiece_of``.
    """
    tokenizer = text.tokenizer
    size = text.vocabulary
    if isinstance(tokenizer, Library) and pieces is not None:
        entries = _of_sentencepiece(pieces)
        _add_tokens(entries, tokenizer, pieces.size)
    elif isinstance(tokenizer, Library | Bytes):
        entries = _of_byte_level(tokenizer, json.loads(tokenizer.compiled()))
    elif isinstance(tokenizer, SentencePiece):
        entries = _of_sentencepiece(tokenizer)
    else:
        raise _refused(tokenizer, "llama.cpp has no such kind")
    for id in range(tokenizer.size, size):
        entries["tokens"].append(f"[PAD{id}]")
        entries["token_type"].append(UNUSED)
        if "scores" in entries:
            entries["scores"].append(-10000.0)
    entries |= _special(text)
    words: Keys = {f"ggml.{name}": value for name, value in entries.items()}
    if text.folder.template is not None:
        # a comment removes the same white space as a mark, which only transformers reads
        words["chat_template"] = MARK.sub(r"{#\1 \2#}", text.folder.template)
    return words


def _special(text: RunText) -> Keys:
    """The tokens that begin and end a text, and whether llama.cpp adds them to a text."""
    ids = text.folder.ids
    named = token_id(text.tokenizer, text.folder.tokens.get("eos_token"))
    end = text.tokenizer.eod if named is None else named
    ends = sorted(text.folder.ends, key=lambda id: id != end)  # the end that the chat template writes comes first
    begin = (text.before or (first(ids["bos_token_id"]),))[0]
    ends = [*text.after[-1:], *(id for id in ends if id not in text.after[-1:])]
    if text.before not in ((), (begin,)) or text.after not in ((), tuple(ends[:1])):
        raise _refused(
            text.tokenizer, "its template adds several tokens before or after a text, but llama.cpp adds at most one"
        )
    padding = first(ids["pad_token_id"])
    token_ids = {"bos_token_id": begin, "padding_token_id": padding}
    token_ids |= dict(zip(ENDS, ends, strict=False))
    further = [token_text(text.tokenizer, id) or str(id) for id in ends[len(ENDS) :]]
    if further:
        log.warning("a GGUF file names up to %d tokens that end a text; left out: %s", len(ENDS), ", ".join(further))
    if not ends:
        # llama.cpp would take its default, a comma in byte-level BPEs
        if text.vocabulary > text.tokenizer.size:
            token_ids["eos_token_id"] = text.vocabulary - 1
        else:
            log.warning(
                "the tokenizer has no end-of-document token, so llama.cpp ends a text at its default token, such as a comma; give "
                "llama-cli --ignore-eos, or preprocess with --eod and train again"
            )
    flags = {"add_bos_token": bool(text.before), "add_eos_token": bool(text.after)}
    return {name: id for name, id in token_ids.items() if id is not None} | flags


def _add_tokens(entries: Keys, tokenizer: Library, size: int) -> None:
    """Add the tokens of a tokenizer.json beyond the ``size`` pieces of the model it was made from."""
    added = {id: token for id, token in tokenizer.model.get_added_tokens_decoder().items() if id >= size}
    for id in range(size, tokenizer.size):
        token = added.get(id)
        entries["tokens"].append(token.content if token else f"[PAD{id}]")
        entries["scores"].append(-1000.0)
        entries["token_type"].append(_type(token))


def _type(token: Any) -> int:
    """The type of an added token; UNUSED for None."""
    if token is None:
        return UNUSED
    return CONTROL if token.special else USER_DEFINED


def _of_byte_level(tokenizer: Tokenizer, tree: dict[str, Any]) -> Keys:
    """Keys for a byte-level BPE with a pattern that llama.cpp knows."""
    model = tree["model"]
    if model["type"] != "BPE":
        raise _refused(tokenizer, f"it is a {model['type']}, but llama.cpp supports byte-level BPE")
    unlike = [name for name in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    splits = _splits(tree["pre_tokenizer"], bool(model.get("ignore_merges")))
    if unlike or splits is None or (tree["normalizer"] or {}).get("type") not in (None, "NFC"):
        what = ", ".join(unlike) or "normalizer and pre_tokenizer"
        raise _refused(tokenizer, f"llama.cpp does not know the {what} in its tokenizer.json")
    if tree["normalizer"]:
        log.warning(
            "llama.cpp does not normalise text to NFC as the tokenizer does: ids of decomposed characters will differ"
        )
    tokens = {id: text for text, id in model["vocab"].items()}
    added = {token["id"]: token for token in tree["added_tokens"]}
    tokens |= {id: token["content"] for id, token in added.items()}
    types = dict.fromkeys(tokens, NORMAL)
    types |= {id: CONTROL if token["special"] else USER_DEFINED for id, token in added.items()}
    if tokenizer.eod is not None:
        types[tokenizer.eod] = CONTROL
    return {
        "model": "gpt2",
        "pre": splits,
        "tokens": [tokens.get(id, f"[PAD{id}]") for id in range(tokenizer.size)],
        "token_type": [types.get(id, UNUSED) for id in range(tokenizer.size)],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]] or NO_MERGES,
    }


def _splits(tree: Any, whole: bool) -> str | None:
    """llama.cpp's name for a pre_tokenizer, or None. ``whole``: words that are tokens are never split."""
    steps = tree["pretokenizers"] if tree and tree["type"] == "Sequence" else [tree]
    match [(step["type"], step) for step in steps if step]:
        case [("ByteLevel", {"use_regex": True, "add_prefix_space": False})] if not whole:
            return "gpt-2"
        case [
            ("Digits", {"individual_digits": True}),
            ("ByteLevel", {"use_regex": True, "add_prefix_space": False}),
        ] if not whole:
            return "smollm"
        case [
            ("Split", {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}),
            ("ByteLevel", {"use_regex": False, "add_prefix_space": False}),
        ]:
            return SPLITS.get((pattern, whole))
    return None


def _of_sentencepiece(tokenizer: SentencePiece) -> Keys:
    """Keys for a unigram model, or for a BPE if llama.cpp supports its features."""
    given = parameters(tokenizer)
    if given.kind not in MODELS:
        raise _refused(tokenizer, f"it is of kind {given.kind}")
    if not given.plain:
        raise _refused(tokenizer, f"it is of kind {given.kind}, with user-defined pieces or unusual spaces")
    if given.kind == "bpe" and (given.charsmap or given.squeezed or not given.bytes):
        raise _refused(tokenizer, "llama.cpp's BPE neither normalises text nor merges spaces, and needs byte_fallback")
    if given.kind == "unigram" and given.bytes:
        log.warning("llama.cpp will read characters outside the vocabulary as <unk>; hpclm encodes them as bytes")
    entries: Keys = {
        "model": MODELS[given.kind],
        "pre": "default",
        "tokens": [text for text, _ in given.pieces],
        "scores": [score for _, score in given.pieces],
        "token_type": list(given.types),
        "unknown_token_id": given.unknown,
        "add_space_prefix": given.prefix,
        "remove_extra_whitespaces": given.squeezed,
    }
    if given.charsmap:
        entries["precompiled_charsmap"] = given.charsmap
    return entries


def _refused(tokenizer: Tokenizer, why: str) -> ConfigError:
    return ConfigError(
        f"the {describe(tokenizer.fingerprint)} cannot be written as GGUF: {why}. To export for transformers instead, give a folder as TARGET"
    )
