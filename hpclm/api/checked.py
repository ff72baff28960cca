"""Check arguments of hpclm's functions. Values of other libraries become Python's types; a wrong type is refused in one line."""

import operator
import os
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import suppress
from decimal import Decimal
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from hpclm.base import terminal
from hpclm.base.errors import MACHINE, REFUSED, ArgumentError, ConfigError, HpclmError, Interrupted
from hpclm.base.registry import hint
from hpclm.config import elsewhere, fields, hints
from hpclm.config.checks import MAX_INTEGER, is_utf8, shown
from hpclm.node import import_errors

Function = TypeVar("Function", bound=Callable[..., Any])
BYTES = (bytes, bytearray, memoryview)
PATH = os.PathLike[str]
TEXTS = Sequence[str]
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    PATH: "a path",
    TEXTS: "a list of texts",
    type(None): "None",
}
"""Types that can be checked -> the type in words."""


class UnfitError(Exception):
    """A value is not of the type that an argument or a setting takes."""


def plain(value: Any) -> Any:
    """``value`` as None, text, bool, number, list or dict; UnfitError for other values.

    ``value`` may also be an enum of text, a path, a number of any library, or an array, tensor or Series.
    """
    if callable(getattr(value, "tolist", None)) and not isinstance(value, BYTES):
        try:
            value = value.tolist()
        except Exception:  # a tensor without data; objects of a library may raise anything
            raise UnfitError(type(value).__name__) from None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return operator.index(value)
    if isinstance(value, (Real, Decimal)):
        with suppress(ValueError, OverflowError):
            return float(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (Sequence, KeysView, ValuesView)) and not isinstance(value, BYTES):
        return [plain(element) for element in value]
    raise UnfitError(type(value).__name__)


def fitted(value: Any, *kinds: Any) -> Any:
    """``value`` as the first possible of ``kinds``, types in WORDS or Literals; UnfitError if none is possible."""
    if isinstance(value, os.PathLike) and PATH not in kinds:
        raise UnfitError(type(value).__name__)
    try:
        value = plain(value)
    except Exception:  # a mapping that contains itself; objects of a library may raise anything
        raise UnfitError(type(value).__name__) from None
    for kind in (kind for kind in kinds if kind is not str or PATH not in kinds):
        with suppress(UnfitError):
            return _as_kind(value, kind)
    raise UnfitError(type(value).__name__)


def prompts_of(prompt: str | list[str]) -> list[str]:
    """A prompt, or the prompts of a list; ConfigError if they are not text."""
    try:
        prompts: list[str] = [fitted(prompt, str)] if isinstance(prompt, str) else fitted(prompt, TEXTS)
    except UnfitError:
        raise ConfigError(f"the prompt must be text, or a list of texts, not {type(prompt).__name__}") from None
    broken = [shown(text) for text in prompts if not is_utf8(text)]
    if broken:
        raise ConfigError(f"the prompt {broken[0]} holds half a character (a lone surrogate)")
    return prompts


def _as_kind(value: Any, kind: Any) -> Any:
    """A plain value as ``kind``; UnfitError if that is impossible."""
    if kind is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        value = int(value)
    if kind is int and type(value) is int and abs(value) > MAX_INTEGER:
        raise UnfitError
    if kind == PATH and type(value) is str and "\0" not in value:
        with suppress(UnicodeEncodeError):
            os.fsencode(value)
            return value
    if kind == TEXTS and type(value) is list and all(type(element) is str for element in value):
        return value
    if get_origin(kind) is Literal and value in get_args(kind):
        return value
    if kind in (int, float, bool, str, type(None)) and type(value) is kind:
        return value
    raise UnfitError


def checked(function: Function) -> Function:
    """``function`` with checked arguments: ConfigError for wrong types. An interrupt is reported in one line."""
    kinds = dict(_kinds(function))
    expected = signature(function)
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := [word for word in kwargs if word not in expected.parameters]:
            raise ConfigError([_unknown(word, name, expected.parameters) for word in unknown])
        try:
            bound = expected.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}") from None
        problems = []
        for argument in (argument for argument in kinds if argument in bound.arguments):
            value = bound.arguments[argument]
            try:
                bound.arguments[argument] = fitted(value, *kinds[argument])
            except UnfitError:
                problems.append(f"{argument}={shown(value)} must be {' or '.join(map(_described, kinds[argument]))}")
        if problems:
            raise ConfigError(problems)
        try:
            return function(*bound.args, **bound.kwargs)
        except ConfigError as error:
            raise ConfigError(map(terminal.line, error.problems)) from None
        except OSError as error:
            if error.errno not in (*MACHINE, *REFUSED):
                raise
            kind = HpclmError if error.errno in MACHINE else ConfigError
            path = terminal.line(shown(error.filename))
            raise kind(f"{path}: {error.strerror}; check its type and permissions") from error
        except (HpclmError, Interrupted):
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"{name} was interrupted") from None
        except Exception as error:
            if reason := import_errors.explained(error):
                raise ConfigError(reason) from None
            raise

    return cast(Function, call)


def _unknown(argument: str, name: str, parameters: Mapping[str, Parameter]) -> str:
    """The message for an unknown argument, with the intended argument or setting if it is clear."""
    problem = f"{name} has no argument {argument!r}"
    near = hint(argument, parameters)
    if near or "changes" not in parameters:
        return f"{problem}.{near}"
    found = [*elsewhere.answers(argument)]
    if len(found) > 1 or any(answer.reason for answer in found):
        return f"{problem}: {elsewhere.explained(argument)}"
    keys = [hints.nearest(argument, fields.keys()) or "optim.lr"]
    if found:
        keys = elsewhere.keys(found[0].settings)
    return f"{problem}; settings are given as {{{', '.join(f'{key!r}: ...' for key in keys)}}}"


def positive(**numbers: float | None) -> None:
    """ArgumentError for each number that is not above 0."""
    wrong = {name: value for name, value in numbers.items() if value is not None and not value > 0}
    rules = {int: "must be at least 1", float: "must be more than 0"}
    ArgumentError.refuse((name, value, rules[type(value)]) for name, value in wrong.items())


def _kinds(function: Callable[..., Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each parameter with its possible types, if all of them can be checked."""
    for name, parameter in signature(function).parameters.items():
        hint = parameter.annotation
        simple = hint in WORDS or get_origin(hint) is Literal
        kinds = (hint,) if simple else get_args(hint)
        if kinds and parameter.kind is not Parameter.VAR_POSITIONAL and all(map(_described, kinds)):
            yield name, kinds


def _described(kind: Any) -> str:
    """A type in words; empty if it cannot be checked."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return WORDS.get(kind, "")
