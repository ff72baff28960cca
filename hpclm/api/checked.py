"""Arguments of a wrong type are refused by name, in one line; so is the answer to an interrupt."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from hpclm.config import fields, hints
from hpclm.errors import ConfigError, Interrupted
from hpclm.registry import hint

Function = TypeVar("Function", bound=Callable[..., Any])
KINDS: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),  # also NumPy's
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "text"),
    os.PathLike[str]: (os.PathLike, "a path"),
    Sequence[str]: (Sequence, "a list of texts"),
    type(None): (type(None), "None"),
}
WORDS = {
    " (command line)": "",
    "--from STEP": "resume_step=STEP",
    "give the path of a dataset made by 'hpclm preprocess'": "give data=, a text or the prefix of a dataset",
    "with --column": "by hpclm preprocess --column",
    "with --json-keys": "by hpclm preprocess --json-keys",
}
"""Words of the command line in messages, and what they are in Python."""


def checked(function: Function) -> Function:
    """``function`` for users: ConfigError for arguments whose type is not the annotated one, messages in the words of Python, and an
    interrupt in one line."""
    kinds, expected = dict(_kinds(function)), signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := [name for name in kwargs if name not in expected.parameters]:
            raise ConfigError([_unknown(name, function) for name in unknown])
        try:
            given = expected.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ConfigError(f"{function.__name__}: {error}") from None
        problems = [
            f"{name}={value!r} must be {' or '.join(map(_described, kinds[name]))}"
            for name, value in given.items()
            if name in kinds and not any(_fits(value, kind) for kind in kinds[name])
        ]
        if problems:
            raise ConfigError(problems)
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise ConfigError(map(_in_python, error.problems)) from None
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"{function.__name__} was interrupted") from None

    return cast(Function, call)


def _unknown(name: str, function: Callable[..., Any]) -> str:
    parameters = signature(function).parameters
    problem, near = f"{function.__name__} has no argument {name!r}", hint(name, parameters)
    if near or "changes" not in parameters:
        return f"{problem}.{near}"
    setting = hints.meant(name, fields.keys()) or "optim.lr"
    return (
        f"{problem}: {setting}"
        if hints.is_reason(setting)
        else f"{problem}; settings are given as {{{setting!r}: ...}}"
    )


def _in_python(problem: str) -> str:
    for words, meant in WORDS.items():
        problem = problem.replace(words, meant)
    return problem


def positive(**values: float | None) -> None:
    """ConfigError for numbers that are not more than 0."""
    if problems := [
        f"{name}={value} must be more than 0" for name, value in values.items() if value is not None and not value > 0
    ]:
        raise ConfigError(problems)


def _kinds(function: Callable[..., Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The types that each parameter may have, where all of them are simple ones."""
    for name, parameter in signature(function).parameters.items():
        hint = parameter.annotation
        kinds = (hint,) if get_origin(hint) in (Literal, Sequence, os.PathLike) else get_args(hint) or (hint,)
        if parameter.kind is not Parameter.VAR_POSITIONAL and all(
            kind in KINDS or get_origin(kind) is Literal for kind in kinds
        ):
            yield name, kinds


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind == Sequence[str] and isinstance(value, Sequence):
        return all(isinstance(each, str) for each in value)
    return isinstance(value, KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))


def _described(kind: Any) -> str:
    return f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else KINDS[kind][1]
