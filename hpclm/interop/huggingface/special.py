"""Special tokens (begin, end and padding of a text), chat template and settings of generation: import from a Hugging Face folder,
and export.

An import stores them next to the tokenizer's files, for every run that uses those.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpclm.config.reading import json_object
from hpclm.datasets.chat import TEMPLATE, template_in
from hpclm.errors import ConfigError
from hpclm.files import read_text

log = logging.getLogger(__name__)
FILE = "special_tokens.json"
GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TEXTS = ("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token")


def of_folder(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens of a Hugging Face folder; more specific files override config.json."""
    tokens = {name: config[name] for name in IDS if config.get(name) is not None}
    for file, names in (
        (GENERATION, IDS),
        ("special_tokens_map.json", TEXTS),
        ("tokenizer_config.json", TEXTS),
    ):
        if (folder / file).is_file():
            tree = json_object(folder / file)
            tokens |= {name: tree[name] for name in names if tree.get(name) is not None}
    for name in TEXTS:
        if isinstance(tokens.get(name), dict):  # an AddedToken with its options
            tokens[name] = tokens[name].get("content")
    return {name: value for name, value in tokens.items() if _sane(name, value)}


def keep(place: Path, tokens: Mapping[str, Any]) -> None:
    """Write them into the folder ``place``, which is created if necessary."""
    if tokens:
        place.mkdir(exist_ok=True)
        (place / FILE).write_text(json.dumps(tokens, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def keep_chat(folder: Path, place: Path) -> None:
    """Keep the chat template and the settings of generation of a Hugging Face folder in the folder ``place``."""
    template, generation = template_in(folder), folder / GENERATION
    for name, text in ((TEMPLATE, template), (GENERATION, read_text(generation) if generation.is_file() else None)):
        if text is not None:
            place.mkdir(exist_ok=True)
            (place / name).write_text(text, encoding="utf-8")


def chat_of_run(run: Path, paths: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """The chat template of a run, and its settings of generation; None and {} if it has none. ``paths``: as of ``of_run``."""
    places = _places(run, paths)
    templates = (text for place in places if (text := template_in(place)) is not None)
    settings = (json_object(place / GENERATION) for place in places if (place / GENERATION).is_file())
    return next(templates, None), next(settings, {})


def kept(places: Iterable[Path]) -> dict[str, Any]:
    """The special tokens in the first of ``places`` that has them; {} if none has."""
    for place in places:
        if (place / FILE).is_file():
            try:
                return {name: value for name, value in json_object(place / FILE).items() if _sane(name, value)}
            except ConfigError as error:
                log.warning("%s; it is ignored", error)
    return {}


def of_run(run: Path, paths: Sequence[str]) -> dict[str, Any]:
    """The special tokens kept beside the tokenizer files ``paths`` of a run, or in its own directory."""
    return kept(_places(run, paths))


def _places(run: Path, paths: Sequence[str]) -> list[Path]:
    return [*(Path(path).parent for path in paths[:1]), run / "tokenizer"]


def ids(known: Mapping[str, Any], end: int | None) -> dict[str, Any]:
    """Ids for config.json: the ``known`` ones, and the run's end-of-document token, which also begins a text."""
    tokens = {name: known.get(name) for name in IDS}
    ends = tokens["eos_token_id"] if isinstance(tokens["eos_token_id"], list) else [tokens["eos_token_id"]]
    if end is not None and end not in ends:  # the run was trained with another
        tokens["eos_token_id"] = end
    if tokens["bos_token_id"] is None:
        tokens["bos_token_id"] = end
    return tokens


def begin(run: Path, paths: Sequence[str], end: int | None) -> int | None:
    """Id of the token that begins a text for a run whose tokenizer has these files and this end-of-document token."""
    return first(ids(of_run(run, paths), end)["bos_token_id"])


def first(value: Any) -> int | None:
    """The first id in a value of config.json."""
    one = value[0] if isinstance(value, list) else value
    return one if isinstance(one, int) else None


def _sane(name: str, value: Any) -> bool:
    if name.startswith("add_"):
        return isinstance(value, bool)
    if name in TEXTS:
        return isinstance(value, str) and bool(value)
    whole = value if isinstance(value, list) and name == "eos_token_id" else [value]
    return name in IDS and bool(whole) and all(type(one) is int and one >= 0 for one in whole)
