"""The tokenizer next to the weights, with special tokens and chat template: exported for transformers, imported from its folders."""

import json
import logging
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.data import chat_record, tokenizers
from hpclm.data.tokenizers import Tokenizer
from hpclm.interop.huggingface import auto_tokenizer
from hpclm.interop.huggingface.auto_tokenizer import AutoTokenizer
from hpclm.interop.rules import first_few
from hpclm.preprocess import run_text
from hpclm.preprocess.chat import TEMPLATE, template_in
from hpclm.preprocess.run_text import RunText
from hpclm.preprocess.special_tokens import ADDED, FILE, GENERATION, IDS, first, is_sane, is_text
from hpclm.preprocess.tokenizers.huggingface import Library, alike, encoder, of_sentencepiece, without_template
from hpclm.preprocess.tokenizers.sentencepieces import SentencePiece, parameters

log = logging.getLogger(__name__)
PROBES = (
    "line\nbreak", "two  spaces", " before", "after ", "", "   ", "tab\there", "a\r\nb", "\n\n", "x\n\n\ny", "don't",
    "I'LL", "12,345.67 + 8%", "...---...", "aaaaaaaaaaaa", "ﬁne ①② Ｈｅｌｌｏ", "caf\u00e9 cafe\u0301 a\u0301\u0323",
    "ÀÉÎõß", "x\u00a0y\u200bz", "日本語のテキスト。", "中文，没有空格。", "한국어 문장", "Привет, мир", "مرحبا ١٢٣", "\u2581under",
    "😀 x 👩\u200d👩\u200d👧", "a\x01b", "\ufeffbom", "def f(x):\n    return x  # a comment\n",
    "The quick brown fox jumps over the lazy dog; so it goes, and then it comes back again.",
)  # fmt: skip
"""Texts on which tokenizers tend to differ."""
WIDTH = 16
CHUNKS = 256
"""Up to CHUNKS test texts are made from the vocabulary, each of WIDTH consecutive ids."""
KINDS = (
    ("json", ("tokenizer.json",)),
    ("gpt2", ("vocab.json", "merges.txt")),
    ("sentencepiece", ("tokenizer.model",)),
    ("sentencepiece", ("spiece.model",)),
)
"""Maps our kinds of tokenizers to their files in a Hugging Face folder; the first existing file counts."""


def of_run(data: DataConfig) -> Tokenizer | None:
    """The run's tokenizer; None, with a warning, if it is unknown or its files are missing."""
    if data.source != "indexed" and data.tokenizer is None:
        return None
    try:
        return tokenizers.of_run(data)
    except ConfigError as error:
        log.warning("exported without a tokenizer: %s", error)
        return None


def write(folder: Path, text: RunText, paths: list[str], context: int) -> None:
    """Write the tokenizer for transformers' AutoTokenizer into ``folder``. ``paths``: its own files.

    The result is tested on many texts; a warning reports differing ids.
    """
    tokenizer = text.tokenizer
    kind = tokenizer.fingerprint["kind"]
    named: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(tokenizer, Library):
        whole = files.read_text(paths[0]) if kind == "json" else tokenizer.model.to_str(pretty=True)
        (folder / "tokenizer.json").write_text(whole if text.imported else without_template(whole), encoding="utf-8")
        if kind == "gpt2":
            for path, name in zip(paths, ("vocab.json", "merges.txt"), strict=True):
                shutil.copyfile(path, folder / name)
    elif isinstance(tokenizer, SentencePiece):
        model = tokenizer.model.serialized_model_proto()
        known_model = parameters(tokenizer)
        whole = of_sentencepiece(known_model) if known_model.kind == "bpe" and known_model.plain else None
        if whole is not None and not differing(tokenizer.encode, encoder(whole), tokenizer):
            (folder / "tokenizer.json").write_text(whole, encoding="utf-8")
            (folder / "tokenizer.model").write_bytes(model)  # for programs that do not read tokenizer.json
        else:  # a class of transformers that uses the sentencepiece library
            (folder / "spiece.model").write_bytes(model)
            unknown = run_text.token_text(tokenizer, tokenizer.model.unk_id())
            named = {
                "tokenizer_class": "BertGenerationTokenizer",
                "unk_token": unknown,
                "pad_token": None,
                "sep_token": None,
            }
    else:
        log.warning(
            "the %s has no Hugging Face form; exported without a tokenizer", tokenizers.describe(tokenizer.fingerprint)
        )
        return
    end = run_text.token_text(tokenizer, tokenizer.eod)
    settings = {"model_max_length": context, "clean_up_tokenization_spaces": False, **named}
    if not text.imported:
        settings["bos_token"] = end
    settings |= {name: value for name, value in text.imported_tokens.items() if is_text(name)}
    if end:
        settings["eos_token"] = end
    if text.chat:  # the template must write the same text here as in training
        settings = {name: value for name, value in settings.items() if not chat_record.names(text.chat.template, name)}
        tokens = {name: token for name, token in text.chat.tokens.items() if _has(tokenizer, token)}
        named = {name: token for name, token in text.chat.named.items() if name in tokens}
        settings = {**tokens, **settings, **named}
    settings |= _added_ends(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    theirs = auto_tokenizer.opened(folder)
    if theirs is None:
        return
    # gpt2, wordpiece and sentencepiece read the text of a special token as ordinary text
    added = [*theirs.added] if kind == "json" else []
    avoided = [] if kind == "json" else [*theirs.added]
    wrong = differing(partial(text.encode, template=True), theirs.encode, tokenizer, added, avoided)
    if wrong:
        log.warning("transformers will return other ids for some texts: %s", wrong)


def _added_ends(text: RunText) -> dict[str, bool]:
    """The options for tokens added by the template, if it adds only those that begin and end a text."""
    named = (run_text.token_id(text.tokenizer, text.imported_tokens.get(name)) for name in ("bos_token", "eos_token"))
    begin, end = ((id,) if id is not None else () for id in named)
    if not text.imported or text.before not in ((), begin) or text.after not in ((), end):
        return {}
    return {"add_bos_token": bool(text.before), "add_eos_token": bool(text.after)}


def differing(
    ours: Callable[[str], list[int]],
    theirs: Callable[[str], list[int]],
    tokenizer: Tokenizer,
    added: Sequence[str] = (),
    avoided: Sequence[str] = (),
) -> str | None:
    """The first test text that ``theirs`` and ``ours`` encode differently, with both ids; None if all agree.

    ``tokenizer``: its vocabulary supplies test texts. ``added``: tokens to use in further test texts. ``avoided``: tokens that must not
    occur in test texts.
    """
    size = tokenizer.size
    pieces = (range(begin, min(begin + WIDTH, size)) for begin in range(0, size, max(WIDTH, size // CHUNKS)))
    written = (tokenizer.decode(list(ids)) for ids in pieces)
    for text in (*PROBES, *auto_tokenizer.texts_with(added), *written, *_characters()):
        if any(token in text for token in avoided):
            continue
        here = ours(text)
        there = theirs(text)
        if here != there:
            pairs = enumerate(zip_longest(here, there))
            first = next(place for place, (one, other) in pairs if one != other)
            here, there = (ids[first : first + 6] for ids in (here, there))
            return f"{text[:57]!r} is {here} here and {there} there, from id {first} on"
    return None


@cache
def _characters() -> tuple[str, ...]:
    """Texts with every character that normalisation may change, composed and decomposed, in upper and lower case."""
    changed = (c for c in map(chr, range(0x80, sys.maxunicode)) if unicodedata.decomposition(c) or c.lower() != c)
    forms = [
        form
        for c in changed
        for form in dict.fromkeys(
            [c, *(unicodedata.normalize(nf, x) for nf in ("NFD", "NFKD") for x in (c, c.upper()))]
        )
    ]
    return tuple(" ".join(forms[begin : begin + 64]) for begin in range(0, len(forms), 64))


def take(
    folder: Path, entries: int, staging_dir: Path, final: Path, folder_tokens: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Copy the tokenizer of a Hugging Face folder into the run ``staging_dir``, as transformers' AutoTokenizer reads it. Returns the
    data settings that name it, and its special tokens.

    ``entries``: size of the network's vocabulary. ``final``: final path of the run. ``folder_tokens``: the folder's special tokens.
    Without a tokenizer that hpclm supports, warns and returns no settings.
    """
    kinds = [(kind, names) for kind, names in KINDS if all((folder / name).is_file() for name in names)]
    if not kinds:
        log.warning("%s has no tokenizer that hpclm supports; set data.tokenizer and data.tokenizer_files", folder)
        return {}, dict(folder_tokens)
    theirs = auto_tokenizer.opened(folder)
    tokens = dict(folder_tokens) if theirs is None else {**_without_texts(folder_tokens), **theirs.named}
    place = staging_dir / "tokenizer"
    place.mkdir(exist_ok=True)
    try:
        if theirs is None or theirs.text is None:
            kind, names = kinds[0]
            for name in names:
                shutil.copyfile(folder / name, place / name)
        else:
            kind = "json"
            names = ("tokenizer.json",)
            _write_json(folder, theirs.text, entries, place)
        tokenizer = _built(kind, [str(place / name) for name in names], tokens)
        if tokenizer.size > entries:
            raise ConfigError(f"it has {tokenizer.size} entries, but the network has {entries}")
    except ConfigError as error:
        log.warning("the tokenizer in %s is left out: %s", folder, "; ".join(error.problems))
        shutil.rmtree(place)
        return {}, dict(folder_tokens)
    if kind == "json":
        for model in ("tokenizer.model", "spiece.model"):  # the source of tokenizer.json; GGUF needs it
            if (folder / model).is_file():
                shutil.copyfile(folder / model, place / model)
    _warn_of_differences(folder, tokenizer, theirs, tokens, entries)
    settings: dict[str, Any] = dict(
        tokenizer=kind, tokenizer_files=[str(final.absolute() / "tokenizer" / name) for name in names]
    )
    end = tokenizer.fingerprint.get("options", {}).get("eod")
    if end:
        settings["eod"] = end
    tokens = {name: value for name, value in tokens.items() if not isinstance(value, str) or _has(tokenizer, value)}
    return settings, tokens


def _write_json(folder: Path, text: str, entries: int, place: Path) -> None:
    """Write the tokenizer.json ``text`` into ``place``; copies the folder's own file, byte for byte, if it is equivalent."""
    text, beyond = auto_tokenizer.within(text, entries)
    if beyond:
        some = first_few(list(map(repr, beyond)))
        log.warning("the network has no entries for the added tokens %s of %s; omitting them", some, folder)
    original = folder / "tokenizer.json"
    if original.is_file() and alike(files.read_text(original), text):
        shutil.copyfile(original, place / original.name)
    else:
        (place / original.name).write_text(text, encoding="utf-8")


def _warn_of_differences(
    folder: Path, tokenizer: Tokenizer, theirs: AutoTokenizer | None, tokens: Mapping[str, Any], entries: int
) -> None:
    """Warn of texts that the run will encode differently from transformers."""
    lost = sorted({token for token in auto_tokenizer.declared(folder) if not _has(tokenizer, token)})
    if lost and (theirs is None or theirs.text is None):
        log.warning(
            "added tokens of %s are not supported, and are read as ordinary text: %s", folder, ", ".join(lost[:9])
        )
    if theirs is None:
        return
    template = tokenizer.template() if isinstance(tokenizer, Library) else ((), ())
    ours = RunText(tokenizer, tokens, True, entries, *template)
    added = [token for token, id in theirs.added.items() if theirs.text and id < entries]
    avoided = [token for token in theirs.added if token not in added]
    wrong = differing(partial(ours.encode, template=True), theirs.encode, tokenizer, added, avoided)
    if wrong:
        log.warning("transformers returns other ids than the run will for some texts: %s", wrong)


def _has(tokenizer: Tokenizer, text: str) -> bool:
    return run_text.token_id(tokenizer, text) is not None


def _without_texts(tokens: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tokens.items() if not is_text(name) and name not in ADDED}


def _built(kind: str, paths: list[str], tokens: Mapping[str, Any]) -> Tokenizer:
    tokenizer = tokenizers.build_tokenizer(kind, paths)
    end = tokens.get("eos_token") or run_text.token_text(tokenizer, first(tokens.get("eos_token_id")))
    if end is None:
        return tokenizer
    try:
        other = tokenizers.build_tokenizer(kind, paths, end)
    except ConfigError as error:
        log.warning("the end-of-text token %s is not used: %s", end, "; ".join(error.problems))
        return tokenizer
    return tokenizer if tokenizer.eod == other.eod else other


def special_tokens_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens of a Hugging Face folder; more specific files override config.json."""
    tokens = {name: config[name] for name in IDS if config.get(name) is not None}
    for file in (GENERATION, "special_tokens_map.json", "tokenizer_config.json"):
        tree = auto_tokenizer.optional_json(folder / file)
        names: Iterable[str] = IDS
        if file != GENERATION:
            names = [name for name in tree if is_text(name) or name in ADDED]
        tokens |= {name: tree[name] for name in names if tree.get(name) is not None}
    for name, value in tokens.items():
        if isinstance(value, dict):  # an AddedToken with its options
            tokens[name] = value.get("content")
    return {name: value for name, value in tokens.items() if is_sane(name, value)}


def keep_special_tokens(place: Path, tokens: Mapping[str, Any]) -> None:
    """Write ``tokens`` into the folder ``place``, which is created if necessary."""
    place.mkdir(exist_ok=True)
    (place / FILE).write_text(json.dumps(tokens, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def keep_chat(folder: Path, place: Path) -> None:
    """Copy the chat template and generation settings of a Hugging Face folder into the folder ``place``."""
    texts = {TEMPLATE: template_in(folder)}
    if (folder / GENERATION).is_file():
        texts[GENERATION] = files.read_text(folder / GENERATION)
    for name, text in texts.items():
        if text is not None:
            place.mkdir(exist_ok=True)
            (place / name).write_text(text, encoding="utf-8")
