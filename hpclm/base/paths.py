"""Expand ``~``, ``~USER``, ``$NAME``, ``${NAME}`` and ``${oc.env:NAME}`` in paths, by the same rules in all settings and options.

Text is expanded once, when it becomes a setting or an argument. ``./~`` and ``\\$NAME`` are folders with these names.
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
    """``text`` with expanded variables and home folder; ConfigError for an unset variable or an unknown user."""
    return with_home(with_variables(text))


def with_variables(text: str, resolved_later: Callable[[str], bool] | None = None) -> str:
    """``text`` with the values of environment variables; ConfigError for a variable that is not set.

    ``resolved_later``: tells whether OmegaConf will replace the text in ``${...}``; with it, ``${`` in values is escaped.
    """

    def value(match: re.Match[str]) -> str:
        backslashes = match["escape"]
        braces = match["inside"]
        if len(backslashes) % 2:  # \$NAME is not a variable
            for_omegaconf = resolved_later is not None and braces is not None
            return match[0] if for_omegaconf else match[0][len(backslashes) // 2 + 1 :]
        if resolved_later is not None and braces is not None and resolved_later(braces):
            return match[0]
        variable = _variable(text, match, of_setting=resolved_later is not None)
        if resolved_later is not None:
            variable = re.sub(r"(\\*)\$\{", r"\1\1\\${", variable)
        return backslashes[: len(backslashes) // 2] + variable

    return _VARIABLE.sub(value, text)


def _variable(text: str, match: re.Match[str], of_setting: bool) -> str:
    """The value of the variable that ``match`` names in ``text``; ``of_setting``: braces may name another setting too."""
    name = match["name"]
    default = None
    if name is None:
        inside = _IN_BRACES.fullmatch(match["inside"])
        if inside is None:
            raise ConfigError(f"{text}: {match[0].lstrip(chr(92))} is not a variable; write $NAME or ${{NAME}}")
        name, default = inside.groups()
    if os.environ.get(name):
        return os.environ[name]
    if default is not None:
        return str(default).strip("'\"")
    state = f"the environment variable {name} is not set here"
    if name in os.environ:
        state = f"the environment variable {name} is empty here"
    elif of_setting and match["inside"] == name:
        state = f"there is neither a setting nor an environment variable {name}"
    raise ConfigError(f"{text}: {state}; export it, or write \\${name} for a folder of that name")


def with_home(text: str) -> str:
    """``text`` with the home folder for a leading ``~`` or ``~USER``; ``./~`` becomes absolute, so that it is never expanded.

    ConfigError for a URL, which would name a folder ``s3:`` here, and for an unknown user.
    """
    if _URL.match(text):
        way_out = "mount the storage, or copy what is there, and give the path"
        if text.lower().startswith("file:///"):
            way_out = f"write {text[7:]}"
        raise ConfigError(f"{text}: this is a URL, but only files of this machine are read and written; {way_out}")
    if not text.startswith("~"):
        return str(Path(text).absolute()) if str(Path(text)).startswith("~") else text
    whole = os.path.expanduser(text)  # noqa: PTH111 - which keeps how the path is written
    if whole.startswith("~"):
        name = text.partition("/")[0]
        raise ConfigError(f"{text}: no home folder {name}; write ./{text} for a folder of that name")
    return whole


def literal(path: str | Path) -> str:
    """``path`` as text that expands to exactly ``path``: variables and a leading ``~`` in it are escaped."""
    text = _VARIABLE.sub(lambda match: f"{match['escape']}\\{match[0]}", str(path))
    return f"./{text}" if text.startswith("~") else text


def option(text: str) -> str:
    """The expanded value of an option, for argparse."""
    try:
        return expanded(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def option_path(text: str) -> Path:
    """The expanded value of an option, as a Path."""
    return Path(option(text))


def option_paths(text: str) -> str:
    """The expanded value of an option that has several paths, separated by commas."""
    return ",".join(map(option, text.split(",")))
