"""Writes the folder of a tokenizer (``hpclm.data.tokenizer_folder``), so that transformers' AutoTokenizer gives the same ids."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpclm.base import files, folders
from hpclm.data import tokenizer_folder
from hpclm.data.tokenizer_folder import CONFIG, GENERATION, NOTE, TEMPLATE, TokenizerFolder, listed
from hpclm.data.tokenizers import Tokenizer


def token_text(tokenizer: Tokenizer, id: int | None) -> str | None:
    """The text of a token in its vocabulary, or None."""
    text: str | None = None
    if id is not None and id < tokenizer.size and hasattr(tokenizer, "token_text"):
        text = tokenizer.token_text(id)
    return text


def token_id(tokenizer: Tokenizer, text: str | None) -> int | None:
    """The id of the token with this ``text`` in the vocabulary, or None."""
    id: int | None = None
    if text is not None and hasattr(tokenizer, "token_id"):
        id = tokenizer.token_id(text)
    return id


def with_ends(folder: TokenizerFolder, tokenizer: Tokenizer) -> TokenizerFolder:
    """``folder`` with the end-of-document token of its ``tokenizer`` among the tokens that end a text. If nothing else is known, a text also
    begins with it, as the document after another one does in training."""
    end = tokenizer.eod
    if end is None or end in folder.ends:
        return folder
    text = token_text(tokenizer, end)
    config = dict(folder.config)
    generation = dict(folder.generation)
    named = text is not None and config.get("eos_token") == text
    generation["eos_token_id"] = [*folder.ends, end] if folder.ends and named else end
    if not folder.imported:
        generation["bos_token_id"] = end
    if text is not None:
        config["eos_token"] = text
        if not folder.imported:
            config["bos_token"] = text
    return replace(folder, config=config, generation=generation)


def tuned(
    folder: TokenizerFolder, tokenizer: Tokenizer, template: str, tokens: Mapping[str, str], answer_ends: Iterable[str]
) -> TokenizerFolder:
    """``folder`` for a model that learns conversations: the ``template`` must write the same text there as in training.

    ``tokens``: the special tokens that it was rendered with. ``answer_ends``: the tokens that end an answer.
    """
    known = {name: text for name, text in tokens.items() if token_id(tokenizer, text) is not None}
    others = {name: text for name, text in folder.config.items() if not tokenizer_folder.names(template, name)}
    named = {name: text for name, text in known.items() if tokenizer_folder.names(template, name)}
    generation = dict(folder.generation)
    begin = token_id(tokenizer, named.get("bos_token"))
    if begin is not None:
        generation["bos_token_id"] = begin
    ids = [token_id(tokenizer, text) for text in answer_ends]
    tuned = replace(folder, config={**known, **others, **named}, generation=generation, template=template)
    return tuned.with_further_ends(id for id in ids if id is not None)


def begun_from(base: TokenizerFolder, folder: TokenizerFolder, tokenizer: Tokenizer) -> TokenizerFolder:
    """``folder`` for a run that begins with the weights of a run that has the folder ``base``, whose chat template and ends it keeps.

    Nothing is kept if the special tokens of ``base`` have other ids in ``tokenizer``, that of ``folder``.
    """
    if not base.kind or not _same_tokens(base, tokenizer):
        return folder
    if base.imported and not folder.imported:  # such as with added tokens
        texts = [token_text(tokenizer, id) for id in folder.ends]
        own = folder
        folder = with_ends(replace(base, kind=own.kind, files=own.files, eod=own.eod), tokenizer)
        if own.template is not None:
            folder = tuned(folder, tokenizer, own.template, own.tokens, [text for text in texts if text is not None])
    return replace(folder, template=folder.template or base.template).with_further_ends(base.ends)


def _same_tokens(base: TokenizerFolder, tokenizer: Tokenizer) -> bool:
    """Whether the special tokens of ``base`` have the same ids in ``tokenizer``."""
    before = base.build()
    ids = [id for value in base.ids.values() for id in listed(value)]
    limit = min(before.size, tokenizer.size)
    return all(id < limit and before.decode([id]) == tokenizer.decode([id]) for id in ids)


def write(place: Path, folder: TokenizerFolder, tokenizer: Tokenizer) -> None:
    """Write ``folder`` with its ``tokenizer`` into ``place``, which may exist. Files are replaced one by one, hpclm's note last."""
    contents = _contents(folder, tokenizer)
    names = []
    for file in folder.files:
        name = Path(file).name
        if not Path(file).is_file():  # only its own class knows what it is
            names.append(file)
            continue
        content = files.read_bytes(file)
        same = (other for other, whole in contents.items() if whole == content)
        while name in contents:
            name = f"original-{name}"
        name = next(same, name)
        contents[name] = content
        names.append(name)
    note = {"kind": folder.kind, "files": names, "eod": folder.eod, "imported": folder.imported}
    folders.make_folder(place, 0o755)
    if folder.template is None:
        (place / TEMPLATE).unlink(missing_ok=True)
    for name, content in (*contents.items(), (NOTE, _json(note))):
        files.write_bytes(place / name, content)


def export(place: Path, folder: TokenizerFolder, tokenizer: Tokenizer, context: int) -> None:
    """Write the files that transformers reads into ``place``. ``context``: the longest text of the model, in tokens."""
    folder = replace(folder, config={"model_max_length": context, **folder.config})
    for name, content in _contents(folder, tokenizer).items():
        (place / name).write_bytes(content)


def write_settings(place: Path, folder: TokenizerFolder) -> None:
    """Write the generation settings of ``folder`` into ``place``, without its tokenizer."""
    files.write_bytes(place / GENERATION, _json(folder.generation))


def _contents(folder: TokenizerFolder, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files that transformers reads; without a tokenizer if it has no class for it."""
    opened: dict[str, bytes] = {}
    settings: dict[str, Any] = {}
    if hasattr(tokenizer, "for_transformers"):
        opened, settings = tokenizer.for_transformers(folder)
    if folder.template is not None:
        opened[TEMPLATE] = folder.template.encode()
    if settings:
        opened[CONFIG] = _json({**settings, **folder.config})
    return {**opened, GENERATION: _json(folder.generation)}


def _json(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n"
