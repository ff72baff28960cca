"""The tokenizer next to the weights, with special tokens and chat template: exported for transformers, imported from its folders."""

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.data import tokenizer_folder, tokenizer_writer, tokenizers
from hpclm.data.tokenizer_folder import CONFIG, GENERATION, IDS, TokenizerFolder, first, is_text, template_in
from hpclm.data.tokenizer_writer import token_id, token_text
from hpclm.data.tokenizers import Tokenizer
from hpclm.interop.huggingface import auto_tokenizer
from hpclm.interop.huggingface.auto_tokenizer import AutoTokenizer, optional_json
from hpclm.interop.rules import first_few
from hpclm.preprocess import run_text
from hpclm.preprocess.run_text import RunText
from hpclm.preprocess.tokenizers.huggingface import TokenizerJson, alike
from hpclm.preprocess.tokenizers.probes import differing

log = logging.getLogger(__name__)
KINDS = (
    ("json", ("tokenizer.json",)),
    ("gpt2", ("vocab.json", "merges.txt")),
    ("sentencepiece", ("tokenizer.model",)),
    ("sentencepiece", ("spiece.model",)),
)
"""Maps our kinds of tokenizers to their files in a Hugging Face folder; the first existing file counts."""


def export(place: Path, text: RunText, context: int) -> None:
    """Write the tokenizer for transformers' AutoTokenizer into ``place``, with a warning if it gives other ids for some texts."""
    tokenizer = text.tokenizer
    tokenizer_writer.export(place, text.folder, tokenizer, context)
    if not (place / CONFIG).is_file():
        log.warning(
            "the %s has no Hugging Face form; exported without a tokenizer", tokenizers.describe(tokenizer.fingerprint)
        )
        return
    theirs = auto_tokenizer.opened(place)
    if theirs is None:
        return
    # other kinds read the text of a special token as ordinary text
    added = [*theirs.added] if isinstance(tokenizer, TokenizerJson) else []
    avoided = [] if added else [*theirs.added]
    wrong = differing(partial(text.encode, template=True), theirs.encode, tokenizer, added, avoided)
    if wrong:
        log.warning("transformers will return other ids for some texts: %s", wrong)


def take(folder: Path, entries: int, staging_dir: Path, final: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Write the tokenizer of a Hugging Face folder into the run ``staging_dir``, as transformers' AutoTokenizer reads it. Returns the
    data settings that name it.

    ``entries``: size of the network's vocabulary. ``final``: final path of the run. ``tree``: content of the folder's config.json.
    Without a tokenizer that hpclm supports, warns, keeps the ids of special tokens, and returns no settings.
    """
    place = staging_dir / "tokenizer"
    place.mkdir()
    tokens = _special_tokens(folder, tree)
    generation = optional_json(folder / GENERATION) | {name: tokens[name] for name in IDS if name in tokens}
    kept = TokenizerFolder(imported=True, generation=generation, template=template_in(folder))
    try:
        text = _taken(folder, kept, tokens, entries, place)
    except ConfigError as error:
        log.warning("the tokenizer in %s is left out: %s", folder, "; ".join(error.problems))
        shutil.rmtree(place)
        place.mkdir()
        tokenizer_writer.write_settings(place, kept)
        return {}
    tokenizer_writer.write(place, text.folder, text.tokenizer)
    names = (Path(file).name for file in tokenizer_folder.read(place).files)
    settings: dict[str, Any] = dict(
        tokenizer=text.folder.kind, tokenizer_files=[str(final.absolute() / "tokenizer" / name) for name in names]
    )
    if text.folder.eod:
        settings["eod"] = text.folder.eod
    return settings


def _taken(folder: Path, kept: TokenizerFolder, tokens: Mapping[str, Any], entries: int, place: Path) -> RunText:
    """The tokenizer of a Hugging Face folder, with what is ``kept`` of its settings; its tokenizer.json is written into ``place``.
    ConfigError without one that hpclm supports."""
    kinds = [(kind, names) for kind, names in KINDS if all((folder / name).is_file() for name in names)]
    if not kinds:
        raise ConfigError("it has none that hpclm supports; set data.tokenizer and data.tokenizer_files")
    theirs = auto_tokenizer.opened(folder)
    texts = {name: text for name, text in tokens.items() if is_text(name)} if theirs is None else theirs.named
    kind, names = kinds[0]
    paths = [str(folder / name) for name in names]
    if theirs is not None and theirs.text is not None:
        kind = "json"
        paths = [str(_write_json(folder, theirs.text, entries, place))]
    tokenizer, end = _with_end(kind, paths, texts.get("eos_token"), tokens)
    if tokenizer.size > entries:
        raise ConfigError(f"it has {tokenizer.size} entries, but the network has {entries}")
    config = {name: text for name, text in texts.items() if token_id(tokenizer, text) is not None}
    eod = token_text(tokenizer, tokenizer.eod)
    if eod is not None:
        config["eos_token"] = eod
    begin = token_id(tokenizer, config.get("bos_token"))
    if begin is not None:
        kept = replace(kept, generation={"bos_token_id": begin, **kept.generation})
    whole = replace(kept, kind=kind, files=tuple(paths), eod=end, config=config)
    text = run_text.of_folder(whole, entries, tokenizer)
    _warn_of_differences(folder, text, theirs)
    return replace(text, folder=replace(text.folder, config={**text.folder.config, **_added_ends(text)}))


def _added_ends(text: RunText) -> dict[str, bool]:
    """The options for tokens added by the template, if it adds only those that begin and end a text."""
    named = (token_id(text.tokenizer, text.folder.tokens.get(name)) for name in ("bos_token", "eos_token"))
    begin, end = ((id,) if id is not None else () for id in named)
    if text.before not in ((), begin) or text.after not in ((), end):
        return {}
    return {"add_bos_token": bool(text.before), "add_eos_token": bool(text.after)}


def _write_json(folder: Path, text: str, entries: int, place: Path) -> Path:
    """Write the tokenizer.json ``text`` into ``place``; copies the folder's own file, byte for byte, if it is equivalent. Also copies the
    sentencepiece model that it was made from; GGUF needs it."""
    for model in ("tokenizer.model", "spiece.model"):
        if (folder / model).is_file():
            shutil.copyfile(folder / model, place / model)
    text, beyond = auto_tokenizer.within(text, entries)
    if beyond:
        some = first_few(list(map(repr, beyond)))
        log.warning("the network has no entries for the added tokens %s of %s; omitting them", some, folder)
    original = folder / "tokenizer.json"
    if original.is_file() and alike(files.read_text(original), text):
        shutil.copyfile(original, place / original.name)
    else:
        (place / original.name).write_text(text, encoding="utf-8")
    return place / original.name


def _warn_of_differences(folder: Path, text: RunText, theirs: AutoTokenizer | None) -> None:
    """Warn of texts that the run will encode differently from transformers."""
    tokenizer = text.tokenizer
    lost = sorted({token for token in auto_tokenizer.declared(folder) if token_id(tokenizer, token) is None})
    if lost and (theirs is None or theirs.text is None):
        log.warning(
            "added tokens of %s are not supported, and are read as ordinary text: %s", folder, ", ".join(lost[:9])
        )
    if theirs is None:
        return
    added = [token for token, id in theirs.added.items() if theirs.text and id < text.vocabulary]
    avoided = [token for token in theirs.added if token not in added]
    wrong = differing(partial(text.encode, template=True), theirs.encode, tokenizer, added, avoided)
    if wrong:
        log.warning("transformers returns other ids than the run will for some texts: %s", wrong)


def _with_end(kind: str, paths: list[str], eos: str | None, tokens: Mapping[str, Any]) -> tuple[Tokenizer, str | None]:
    """The tokenizer that ends documents as its folder says, and the text of that token if it is not the default of its kind."""
    tokenizer = tokenizers.build_tokenizer(kind, paths)
    end = eos or token_text(tokenizer, first(tokens.get("eos_token_id")))
    if end is None:
        return tokenizer, None
    try:
        other = tokenizers.build_tokenizer(kind, paths, end)
    except ConfigError as error:
        log.warning("the end-of-text token %s is not used: %s", end, "; ".join(error.problems))
        return tokenizer, None
    return (tokenizer, None) if tokenizer.eod == other.eod else (other, end)


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens of a Hugging Face folder; more specific files override config.json."""
    tokens = {name: config[name] for name in IDS if config.get(name) is not None}
    for file in (GENERATION, "special_tokens_map.json", CONFIG):
        tree = optional_json(folder / file)
        names: Iterable[str] = IDS
        if file != GENERATION:
            names = [name for name in tree if is_text(name)]
        tokens |= {name: tree[name] for name in names if tree.get(name) is not None}
    for name, value in tokens.items():
        if isinstance(value, dict):  # an AddedToken with its options
            tokens[name] = value.get("content")
    return {name: value for name, value in tokens.items() if _is_sane(name, value)}


def _is_sane(name: str, value: Any) -> bool:
    """Whether a special token can have this value."""
    if is_text(name):
        return isinstance(value, str) and bool(value)
    whole = value if isinstance(value, list) and name == "eos_token_id" else [value]
    return bool(whole) and all(type(one) is int and one >= 0 for one in whole)
