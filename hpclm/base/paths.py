"""Paths as people type them: ``~``, ``~USER``, ``$NAME``, ``${NAME}`` and ``${oc.env:NAME}`` mean the same in every setting and option.

They are expanded where the text becomes a setting or an argument, once. ``./~`` and ``\\$NAME`` are a folder of that name.
"""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

from hpclm.base.errors import ConfigError

_VARIABLE = re.compile(
    r"(?P<escape>\\*)\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<inside>[^{}]*)\})",
    re.ASCII,
)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_IN_BRACES = re.compile(r"(?:oc\.env:)?\s*([A-Za-z_]\w*)\s*(?:,\s*(.*?)\s*)?", re.ASCII)


def expanded(text: str) -> str:
    """``text`` with its variables and home folder; ConfigError for a variable that is not set, or a user that does not exist."""
    return with_home(with_variables(text))


def with_variables(text: str, resolved_later: Callable[[str], bool] | None = None) -> str:
    """``text`` with the values of environment variables; ConfigError for one that is not set.

    ``resolved_later``: whether what is in ``${...}`` is for OmegaConf to replace; ``${`` in values is escaped for it then.
    """

    def value(match: re.Match[str]) -> str:
        backslashes = match["escape"]
        braces = match["inside"]
        if len(backslashes) % 2:  # \$NAME is not a variable
            kept = match[0][len(backslashes) // 2 + 1 :] if resolved_later is None or braces is None else match[0]
            return kept
        if braces is not None and resolved_later is not None and resolved_later(braces):
            return match[0]
        variable = _variable(text, match, of_setting=resolved_later is not None)
        if resolved_later is not None:
            variable = re.sub(r"(\\*)\$\{", r"\1\1\\${", variable)
        return backslashes[: len(backslashes) // 2] + variable

    return _VARIABLE.sub(value, text)


def _variable(text: str, match: re.Match[str], of_setting: bool) -> str:
    """The value of the variable that ``match`` names in ``text``; ``of_setting``: other settings may be in braces too."""
    inside = _IN_BRACES.fullmatch(match["inside"]) if match["name"] is None else None
    if match["name"] is None and inside is None:
        raise ConfigError(f"{text}: {match[0].lstrip(chr(92))} is not a variable; write $NAME or ${{NAME}}")
    name, default = (match["name"], None) if inside is None else inside.groups()
    if setting := os.environ.get(name):
        return setting
    if default is not None:
        return str(default).strip("'\"")
    state = f"the environment variable {name} is {'empty' if name in os.environ else 'not set'} here"
    if of_setting and match["inside"] == name and name not in os.environ:
        state = f"there is neither a setting nor an environment variable {name}"
    raise ConfigError(f"{text}: {state}; export it, or write \\${name} for a folder of that name")


def with_home(text: str) -> str:
    """``text`` with the home folder for a leading ``~`` or ``~USER``; ``./~`` becomes absolute, so that it stays what it is.

    ConfigError for a URL, which would name a folder ``s3:`` here, and for a user that does not exist.
    """
    if _URL.match(text):
        local = text[7:] if text.lower().startswith("file:///") else ""
        way_out = f"write {local}" if local else "mount the storage, or copy what is there, and give the path"
        raise ConfigError(f"{text}: this is a URL, but only files of this machine are read and written; {way_out}")
    if not text.startswith("~"):
        return str(Path(text).absolute()) if str(Path(text)).startswith("~") else text
    whole = os.path.expanduser(text)  # noqa: PTH111 - which keeps how the path is written
    if whole.startswith("~"):
        name = text.partition("/")[0]
        raise ConfigError(f"{text}: no home folder {name}; write ./{text} for a folder of that name")
    return whole


def literal(path: str | Path) -> str:
    """``path``, which exists or is to exist under this very name, as text that is expanded to it."""
    text = _VARIABLE.sub(lambda match: f"{match['escape']}\\{match[0]}", str(path))
    return f"./{text}" if text.startswith("~") else text


def option(text: str) -> str:
    """The path that an option names, for argparse."""
    try:
        return expanded(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def option_path(text: str) -> Path:
    """The path that an option names, as a Path."""
    return Path(option(text))


def option_paths(text: str) -> str:
    """Paths between commas."""
    return ",".join(map(option, text.split(",")))
