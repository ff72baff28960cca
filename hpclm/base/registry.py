"""Look up objects by a short name, or by ``package.module:attribute``."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from hpclm.base import extras, files
from hpclm.base.errors import ConfigError

Check = Callable[[Any], str | None]
"""Returns the problem with an object, or None."""
OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def problem(kind: str, name: str, table: Mapping[str, Any]) -> str | None:
    """The error if ``name`` is neither in ``table`` nor of the form package.module:Name; else None. Imports nothing."""
    if name.startswith("__main__:"):
        return f"{kind} {name!r}: {into_a_file(name.partition(':')[2])}"
    if name in table or OWN.fullmatch(name):
        return None
    choices = f"one of {sorted(table)} or " if table else ""
    return f"unknown {kind} {name!r}; choose {choices}'package.module:Name'.{hint(name, table)}"


def lookup(kind: str, name: str, table: Mapping[str, str], check: Check) -> Any:
    """The object ``name``: a name in ``table``, or package.module:Name, which ``check`` checks.

    ConfigError if it does not exist, or ``check`` rejects it. The object is not called.
    """
    wrong = problem(kind, name, table)
    if wrong:
        raise ConfigError(wrong)
    if name in table:
        with extras.needed_for(f"{kind} {name!r}"):
            return load(table[name])
    module, _, attribute = name.partition(":")
    if standard(module):
        raise ConfigError(in_standard_library(kind, name))
    try:
        named = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(not_loaded(kind, name, str(error))) from error
    wrong = check(named)
    if standard(getattr(named, "__module__", None)):
        wrong = "is part of Python's standard library"
    if wrong:
        raise ConfigError(f"{kind} {name!r} {wrong}; `hpclm docs your-own-code` describes what it must be")
    return named


def into_a_file(name: str) -> str:
    """The way out for a class or function ``name`` of a notebook or script."""
    return f"other processes cannot import what a notebook or script defines; put it into a file, such as mine.py, and give 'mine:{name}'"


def in_standard_library(kind: str, name: str) -> str:
    """The error for a ``name`` in Python's standard library, which contains no ``kind``."""
    top = name.partition(":")[0].partition(".")[0]
    return f"{kind} {name!r}: {top} is part of Python's standard library, which contains no {kind}"


def not_loaded(kind: str, name: str, why: str) -> str:
    """The error for the user's own code ``name`` that cannot be loaded, with advice if it is in the current folder."""
    top = name.partition(":")[0].partition(".")[0]
    text = f"{kind} {name!r} cannot be loaded: {why}"
    searched = Path.cwd() in [Path(folder or ".").resolve() for folder in sys.path]
    if not searched and (Path(top).is_dir() or Path(f"{top}.py").exists()):
        text += f"; the current folder is not searched: start with PYTHONPATH={files.typed(Path.cwd())}"
    return text


def load(path: str) -> Any:
    """The object of hpclm at ``path``, "package.module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def class_check(*methods: str, made_with: Sequence[str] = (), named: bool = False, base: type = object) -> Check:
    """A check for a subclass of ``base`` with ``methods``, constructed with the arguments ``made_with`` (``named``: by keyword)."""

    def check(loaded: Any) -> str | None:
        if not inspect.isclass(loaded):
            return "is not a class"
        if not issubclass(loaded, base):
            return f"is not a subclass of {base.__module__}.{base.__qualname__}"
        missing = [name for name in methods if not callable(getattr(loaded, name, None))]
        return f"has no {', '.join(missing)}" if missing else _refuses(loaded, made_with, named)

    return check


def function_check(*parameters: str) -> Check:
    """A check for a Python function or a class that can be called with ``parameters``."""

    def check(loaded: Any) -> str | None:
        if not (inspect.isfunction(loaded) or inspect.isclass(loaded)):
            return "is not a function"
        return _refuses(loaded, parameters, False)

    return check


def _refuses(loaded: Any, parameters: Sequence[str], named: bool) -> str | None:
    try:
        signature = inspect.signature(loaded)
        signature.bind(**dict.fromkeys(parameters)) if named else signature.bind(*parameters)
    except (TypeError, ValueError):
        return f"cannot be called with {', '.join(parameters)}"
    return None


def hint(name: str, names: Mapping[str, Any] | list[str]) -> str:
    """`` Did you mean 'x'?`` with the most similar of ``names``; empty if none is similar."""
    near = get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def standard(module: Any) -> bool:
    """Whether ``module`` is the name of a module of Python's standard library."""
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names
