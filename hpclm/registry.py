"""Turn a short name, or any ``package.module:attribute``, into the object it names."""

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from hpclm.errors import ConfigError


def problem(kind: str, name: str, table: Mapping[str, str]) -> str | None:
    """Why ``name`` cannot be looked up, without importing anything; None when it can."""
    if name in table or ":" in name:
        return None
    return f"unknown {kind} {name!r}; choose one of {sorted(table)} or 'package.module:Name'.{hint(name, table)}"


def lookup(kind: str, name: str, table: Mapping[str, str]) -> Any:
    """The object that ``name`` stands for; ConfigError when there is none."""
    wrong = problem(kind, name, table)
    if wrong:
        raise ConfigError(wrong)
    module, _, attribute = table.get(name, name).partition(":")
    if name not in table and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a person's own module lies where they are; last, so that it hides nothing
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} cannot be loaded: {error}") from error


def hint(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest known name, or nothing."""
    near = get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
