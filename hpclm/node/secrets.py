"""Keep secrets out of what a run writes: values of environment variables named like secrets, and passwords in URLs.

A name counts as a secret's if it contains KEY, TOKEN, SECRET, PASS, CREDENTIAL or JWT, in any case.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

Env = Mapping[str, str]
HIDDEN = "***"
SHORTEST = 6
"""Shorter values are flags (true, 1, none), not secrets."""

_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|JWT", re.IGNORECASE)
_HARMLESS = re.compile(r"tokens(_per_\w+)?|\w*tokeni[sz]\w*", re.IGNORECASE)  # budget.tokens, TOKENIZERS_PARALLELISM
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)(?:([^\s/:@'\"]*:)([^\s/'\"]+)|([^\s/:@'\"]{20,}))@", re.IGNORECASE)
_PAIR = re.compile(r"(?<![\w.-])((?:--?|(?:[a-z]+\.)*(?:env|options)\.)?[A-Za-z_][\w-]*)(\s*[=:]\s*)([^\s,;{}\[\]]+)")


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name holds a secret."""
    return bool(_NAME.search(name)) and not _HARMLESS.fullmatch(name)


class Redactor:
    """Replaces every secret in a text by ``***``."""

    def __init__(self, env: Env = os.environ):
        """``env``: the variables whose values are hidden."""
        values = {value for name, value in env.items() if is_secret(name) and not _is_place(value)}
        values |= {part for value in env.values() for url in _URL.findall(value) for part in url[2:]}
        values |= {line for value in values for line in value.splitlines()}  # a private key is logged line by line
        spelled = {form for value in values if len(value.strip()) >= SHORTEST for form in _spellings(value.strip())}
        longest_first = sorted(spelled, key=lambda form: (-len(form), form))
        self._values = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        """``text`` without values of secret variables and without passwords of URLs."""
        if self._values:
            text = self._values.sub(HIDDEN, text)
        return _URL.sub(rf"\1\2{HIDDEN}@", text) if "://" in text else text

    def knows(self, text: str) -> bool:
        """Whether the value of a secret variable is in ``text``."""
        return bool(self._values and self._values.search(text))

    def words(self, words: Iterable[str]) -> list[str]:
        """A command line, also without secrets it contains itself: ``NAME=value``, ``--name value``, ``--name=value``."""
        found: list[str] = []
        follows = False
        for word in words:
            found.append(HIDDEN if follows and not word.startswith("-") else self(_PAIR.sub(_hide_pair, word)))
            follows = word.startswith("--") and "=" not in word and is_secret(word.lstrip("-"))
        return found

    def command(self, words: Iterable[str]) -> str:
        """A command line as it would be typed, secrets hidden."""
        return shlex.join(self.words(words))


def problems(settings: Mapping[str, Any], env: Env = os.environ) -> list[str]:
    """Problems of nested ``settings`` that contain a secret; they must not, since a run writes its settings to a file."""
    held = {name: Redactor({name: value}) for name, value in env.items()}
    found = []
    for key, text in _leaves(settings):
        inside = [f"the value of ${name}" for name, redact in held.items() if redact.knows(text)]
        inside += ["the password of a URL"] * bool(_URL.search(text))
        inside += ["a secret, by its name"] * bool(text and key.startswith("job.env.") and is_secret(key[8:]))
        if inside:
            found.append(
                f"{key} contains {inside[0]}, and a run's settings are written to its config.yaml; remove it, and export it as "
                "an environment variable where you start or submit the run"
            )
    return found


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif isinstance(value, (list, tuple)):
            yield from _leaves({str(place): each for place, each in enumerate(value)}, f"{above}{name}.")
        elif isinstance(value, str):
            yield above + name, value


def _is_place(value: str) -> bool:
    """Whether a value is the path of a file or folder, and so not a secret itself."""
    try:
        return value.startswith("/") and Path(value).exists()
    except (OSError, ValueError):
        return False


def _spellings(value: str) -> set[str]:
    """How a value may appear in text: unchanged, in a URL, in JSON, in a repr."""
    return {value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1]}


def _hide_pair(found: re.Match[str]) -> str:
    name, sign, value = found.groups()
    last = name.rpartition(".")[2].lstrip("-")
    return f"{name}{sign}{HIDDEN}" if is_secret(last) and value != "null" else found[0]
