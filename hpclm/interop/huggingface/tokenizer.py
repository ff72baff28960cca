"""The tokenizer next to the weights: export for transformers, and import from its folders."""

import json
import logging
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.config import DataConfig
from hpclm.data import tokenizers
from hpclm.data.indexed import sidecar
from hpclm.data.tokenizers import Tokenizer
from hpclm.datasets.tokenizers.huggingface import Library, encoder, of_sentencepiece
from hpclm.datasets.tokenizers.sentencepieces import SentencePiece, parameters
from hpclm.errors import ConfigError
from hpclm.interop.huggingface import special

log = logging.getLogger(__name__)
PROBES = (
    "line\nbreak", "two  spaces", " before", "after ", "", "   ", "tab\there", "a\r\nb", "\n\n", "x\n\n\ny", "don't",
    "I'LL", "12,345.67 + 8%", "...---...", "aaaaaaaaaaaa", "ﬁne ①② Ｈｅｌｌｏ", "caf\u00e9 cafe\u0301 a\u0301\u0323",
    "ÀÉÎõß", "x\u00a0y\u200bz", "日本語のテキスト。", "中文，没有空格。", "한국어 문장", "Привет, мир", "مرحبا ١٢٣", "\u2581under",
    "😀 x 👩\u200d👩\u200d👧", "a\x01b", "\ufeffbom", "def f(x):\n    return x  # a comment\n",
    "The quick brown fox jumps over the lazy dog; so it goes, and then it comes back again.",
)  # fmt: skip
"""Texts on which tokenizers tend to differ."""
WIDTH, CHUNKS = 16, 256
"""The vocabulary is tested in up to CHUNKS runs of WIDTH consecutive ids."""
KINDS = (
    ("json", ("tokenizer.json",)),
    ("gpt2", ("vocab.json", "merges.txt")),
    ("sentencepiece", ("tokenizer.model",)),
    ("sentencepiece", ("spiece.model",)),
)
"""Our kinds, and their files in a Hugging Face folder; the first that exists is used."""


def of_run(data: DataConfig) -> Tokenizer | None:
    """The run's tokenizer; None, with a warning, if it is unknown or its files are missing."""
    if data.source != "indexed" and data.tokenizer is None:
        return None
    try:
        return tokenizers.of_run(data)
    except ConfigError as error:
        log.warning("exported without a tokenizer: %s", error)
        return None


def paths(data: DataConfig) -> list[str]:
    """The files of the run's tokenizer, by its settings or by the note beside a dataset."""
    if data.tokenizer is not None:
        return data.tokenizer_files
    notes = (sidecar(prefix) for prefix in data.prefixes())
    return next((list(note["tokenizer_files"]) for note in notes if "tokenizer_files" in note), [])


def write(folder: Path, tokenizer: Tokenizer, paths: list[str], context: int, known: Mapping[str, Any]) -> None:
    """Write the tokenizer for transformers' AutoTokenizer into ``folder``; ``paths`` are its own files.

    ``known``: special tokens of an imported run. The result is tested on ``PROBES``, with a warning if ids differ.
    """
    kind = tokenizer.fingerprint["kind"]
    named: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(tokenizer, Library):
        text = files.read_text(paths[0]) if kind == "json" else tokenizer.model.to_str(pretty=True)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        if kind == "gpt2":
            for path, name in zip(paths, ("vocab.json", "merges.txt"), strict=True):
                shutil.copyfile(path, folder / name)
        if wrong := differing(tokenizer, encoder(text)):
            log.warning("transformers will return other ids for some texts: %s", wrong)
    elif isinstance(tokenizer, SentencePiece):
        model = tokenizer.model.serialized_model_proto()
        known_model = parameters(tokenizer)
        text = of_sentencepiece(known_model) if known_model.kind == "bpe" and known_model.plain else None
        if text is not None and not differing(tokenizer, encoder(text)):
            (folder / "tokenizer.json").write_text(text, encoding="utf-8")
            (folder / "tokenizer.model").write_bytes(model)  # for programs that do not read tokenizer.json
        else:  # a class of transformers that uses the sentencepiece library
            (folder / "spiece.model").write_bytes(model)
            unknown = _text(tokenizer, tokenizer.model.unk_id())
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
    end = _text(tokenizer, tokenizer.eod)
    settings = {"model_max_length": context, "clean_up_tokenization_spaces": False, **named}
    settings |= {"bos_token": end, "eos_token": end}
    settings |= {name: value for name, value in known.items() if name in special.TEXTS}
    settings |= {"eos_token": end} if end else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def differing(tokenizer: Tokenizer, other: Callable[[str], list[int]]) -> str | None:
    """The first test text for which ``other`` returns other ids, with both; None if there is none."""
    size = tokenizer.size
    pieces = (range(begin, min(begin + WIDTH, size)) for begin in range(0, size, max(WIDTH, size // CHUNKS)))
    written = (tokenizer.decode(list(ids)) for ids in pieces)
    for text in (*PROBES, *written, *_characters()):
        ours, theirs = tokenizer.encode(text), other(text)
        if ours != theirs:
            pairs = enumerate(zip_longest(ours, theirs))
            first = next(place for place, (here, there) in pairs if here != there)
            here, there = (ids[first : first + 6] for ids in (ours, theirs))
            return f"{text[:57]!r} is {here} here and {there} there, from id {first} on"
    return None


def _characters() -> Iterator[str]:
    """Texts with every character that normalisation may change, as it is and decomposed, in both cases."""
    changed = (c for c in map(chr, range(0x80, sys.maxunicode)) if unicodedata.decomposition(c) or c.lower() != c)
    forms = [
        form
        for c in changed
        for form in dict.fromkeys(
            [c, *(unicodedata.normalize(nf, x) for nf in ("NFD", "NFKD") for x in (c, c.upper()))]
        )
    ]
    return (" ".join(forms[begin : begin + 64]) for begin in range(0, len(forms), 64))


def take(folder: Path, entries: int, staging_dir: Path, final: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tokenizer of a Hugging Face folder into the run ``staging_dir``; the data settings that name it.

    ``entries``: size of the network's vocabulary. ``final``: final path of the run. ``known``: the folder's special tokens. {},
    with a warning, if there is no tokenizer that hpclm supports.
    """
    kinds = [(kind, names) for kind, names in KINDS if all((folder / name).is_file() for name in names)]
    if not kinds:
        log.warning("%s has no tokenizer that hpclm supports; set data.tokenizer and data.tokenizer_files", folder)
        return {}
    kind, names = kinds[0]
    try:
        made = _built(kind, [str(folder / name) for name in names], known)
        if made.size > entries:
            raise ConfigError(f"it has {made.size} entries, but the network {entries}")
    except ConfigError as error:
        log.warning("the tokenizer in %s is left out: %s", folder, "; ".join(error.problems))
        return {}
    place = staging_dir / "tokenizer"
    place.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(folder / name, place / name)
    settings = dict(tokenizer=kind, tokenizer_files=[str(final.absolute() / "tokenizer" / name) for name in names])
    end = made.fingerprint.get("options", {}).get("eod")
    return settings | ({"eod": end} if end else {})


def _built(kind: str, paths: list[str], known: Mapping[str, Any]) -> Tokenizer:
    made = tokenizers.build(kind, paths)
    end = known.get("eos_token") or _text(made, special.first(known.get("eos_token_id")))
    if end is None:
        return made
    try:
        other = tokenizers.build(kind, paths, end)
    except ConfigError as error:
        log.warning("the end-of-text token %s is not used: %s", end, "; ".join(error.problems))
        return made
    return made if made.eod == other.eod else other


def _text(tokenizer: Tokenizer, id: int | None) -> str | None:
    if id is None or id >= tokenizer.size:
        return None
    if isinstance(tokenizer, SentencePiece):
        return str(tokenizer.model.id_to_piece(id))
    return tokenizer.model.id_to_token(id) if isinstance(tokenizer, Library) else None
