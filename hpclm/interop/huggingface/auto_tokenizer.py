"""A folder's tokenizer as transformers' AutoTokenizer reads it, with added tokens and template; the only file that uses AutoTokenizer."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpclm.base import extras
from hpclm.config.reading import json_object

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AutoTokenizer:
    """A folder's tokenizer as transformers reads it."""

    encode: Callable[[str], list[int]]
    """Ids of a text, including tokens that the template adds."""
    named: dict[str, str]
    """Texts of bos_token, eos_token and the other tokens that a template may name."""
    added: dict[str, int]
    """Added tokens with their ids."""
    text: str | None
    """The tokenizer as a tokenizer.json; None for classes without one."""


def opened(folder: Path) -> AutoTokenizer | None:
    """The tokenizer in ``folder``; None, with a warning, if transformers cannot open it."""
    with extras.needed_for("the tokenizer of a Hugging Face folder"):
        import transformers
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            str(folder.absolute()), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its many classes raise any exception
        reason = (str(error).splitlines() or [""])[0]
        log.warning("transformers cannot open the tokenizer of %s: %s: %s", folder, type(error).__name__, reason[:200])
        return None
    finally:
        transformers.logging.set_verbosity(level)
    named = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    text = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None

    def encode(document: str) -> list[int]:
        return list(tokenizer(document, verbose=False).input_ids)

    return AutoTokenizer(encode, named, dict(tokenizer.get_added_vocab()), text)


def declared(folder: Path) -> Iterator[str]:
    """The added tokens named in the files of ``folder``."""
    yield from optional_json(folder / "added_tokens.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for token in _added(optional_json(folder / name)):
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                yield text


def optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``; empty if there is no such file."""
    return json_object(path) if path.is_file() else {}


def _added(tree: dict[str, Any]) -> Iterator[Any]:
    """The added tokens in a file of a tokenizer, each a text or an object with the text as its content."""
    decoder = tree.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        yield from decoder.values()
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = tree.get(name)
        if isinstance(tokens, list):
            yield from tokens


def within(text: str, entries: int) -> tuple[str, list[str]]:
    """A tokenizer.json without truncation, padding, and added tokens with ids >= ``entries``; and the omitted tokens."""
    tree = json.loads(text)
    tree["truncation"] = tree["padding"] = None
    beyond = [token["content"] for token in tree["added_tokens"] if token["id"] >= entries]
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["id"] < entries]
    return json.dumps(tree, ensure_ascii=False, indent=2) + "\n", beyond
