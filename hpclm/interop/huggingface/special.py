"""Special tokens, chat template and settings of generation of a Hugging Face folder, and where an import keeps them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpclm.config.reading import json_object
from hpclm.datasets.chat import TEMPLATE, template_in
from hpclm.datasets.special_tokens import ADDED, FILE, GENERATION, IDS, is_sane, is_text
from hpclm.files import read_text


def of_folder(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens of a Hugging Face folder; more specific files override config.json."""
    tokens = {name: config[name] for name in IDS if config.get(name) is not None}
    for file in (GENERATION, "special_tokens_map.json", "tokenizer_config.json"):
        tree = json_object(folder / file) if (folder / file).is_file() else {}
        names = IDS if file == GENERATION else [name for name in tree if is_text(name) or name in ADDED]
        tokens |= {name: tree[name] for name in names if tree.get(name) is not None}
    for name, value in tokens.items():
        if isinstance(value, dict):  # an AddedToken with its options
            tokens[name] = value.get("content")
    return {name: value for name, value in tokens.items() if is_sane(name, value)}


def keep(place: Path, tokens: Mapping[str, Any]) -> None:
    """Write them into the folder ``place``, which is created if necessary."""
    place.mkdir(exist_ok=True)
    (place / FILE).write_text(json.dumps(tokens, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def keep_chat(folder: Path, place: Path) -> None:
    """Keep the chat template and the settings of generation of a Hugging Face folder in the folder ``place``."""
    template, generation = template_in(folder), folder / GENERATION
    for name, text in ((TEMPLATE, template), (GENERATION, read_text(generation) if generation.is_file() else None)):
        if text is not None:
            place.mkdir(exist_ok=True)
            (place / name).write_text(text, encoding="utf-8")
