"""Special tokens (begin, end and padding of a text), chat template and generation settings of an imported run.

An import stores these next to the tokenizer's files, for every run that uses the tokenizer. If a run was tuned on conversations, its chat
settings replace them (``hpclm.data.chat_record``).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config.reading import json_object
from hpclm.preprocess.chat import template_in

log = logging.getLogger(__name__)
FILE = "special_tokens.json"
"""Also marks an imported tokenizer: the file exists even if it names no token."""
GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ADDED = ("add_bos_token", "add_eos_token")


def chat_of_run(run: Path, paths: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """The chat template of a run before tuning, and its generation settings; None and {} without them. ``paths``: see ``of_run``."""
    places = _places(run, paths)
    templates = (text for text in map(template_in, places) if text is not None)
    settings = (json_object(place / GENERATION) for place in places if (place / GENERATION).is_file())
    return next(templates, None), next(settings, {})


def kept(places: Iterable[Path]) -> dict[str, Any] | None:
    """The special tokens in the first of ``places`` that has the file; None without one."""
    for place in places:
        if (place / FILE).is_file():
            try:
                return {name: value for name, value in json_object(place / FILE).items() if is_sane(name, value)}
            except ConfigError as error:
                log.warning("%s; it is ignored", error)
    return None


def of_run(run: Path, paths: Sequence[str]) -> dict[str, Any] | None:
    """The special tokens stored beside a run's tokenizer files ``paths``, or in its directory; None if it was not imported."""
    return kept(_places(run, paths))


def _places(run: Path, paths: Sequence[str]) -> list[Path]:
    return [*(Path(path).parent for path in paths[:1]), run / "tokenizer"]


def ids(
    imported_tokens: Mapping[str, Any], end: int | None, end_text: str | None = None, answer_ends: Iterable[int] = ()
) -> dict[str, Any]:
    """Ids for config.json: the ``imported_tokens``, the run's end-of-document token ``end``, and ``answer_ends``, the tokens that end an
    answer in the conversations it was tuned on.

    ``end_text``: text of ``end``. If the imported folder names this text as its end, ``end`` is added to the imported ends; otherwise it
    replaces them, since the run was trained with another end.
    """
    tokens = {name: imported_tokens.get(name) for name in IDS}
    ends = listed(tokens["eos_token_id"])
    if end is not None and end not in ends:
        more = bool(ends) and end_text is not None and imported_tokens.get("eos_token") == end_text
        ends = [*ends, end] if more else [end]
        tokens["eos_token_id"] = ends if more else end
    further = [id for id in answer_ends if id not in ends]
    if further:
        ends = [*ends, *further]
        tokens["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return tokens


def listed(value: Any) -> list[int]:
    """All ids in a value of config.json."""
    if not isinstance(value, list):
        value = [value]
    return [one for one in value if isinstance(one, int)]


def first(value: Any) -> int | None:
    """The first id in a value of config.json."""
    return next(iter(listed(value)), None)


def is_text(name: str) -> bool:
    """Whether this name refers to a special token by its text: bos_token, eos_token, or any other that a template may name."""
    return name.endswith("_token") and name not in ADDED


def is_sane(name: str, value: Any) -> bool:
    """Whether a special token can have this value."""
    if name.startswith("add_"):
        return isinstance(value, bool)
    if is_text(name):
        return isinstance(value, str) and bool(value)
    whole = value if isinstance(value, list) and name == "eos_token_id" else [value]
    return name in IDS and bool(whole) and all(type(one) is int and one >= 0 for one in whole)
