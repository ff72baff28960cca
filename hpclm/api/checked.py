"""Arguments of a wrong type are refused by name, in one line; so is the answer to an interrupt."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from hpclm import terminal
from hpclm.api import values
from hpclm.config import elsewhere, fields, hints
from hpclm.config.checks import shown
from hpclm.errors import MACHINE, REFUSED, ConfigError, HpclmError, Interrupted
from hpclm.node import import_errors
from hpclm.registry import hint

Function = TypeVar("Function", bound=Callable[..., Any])
KINDS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (values.whole, "a whole number"),
    float: (values.number, "a number"),
    bool: (values.boolean, "True or False"),
    str: (values.text, "text"),
    os.PathLike[str]: (values.path, "a path"),
    Sequence[str]: (values.texts, "a list of texts"),
    type(None): (values.nothing, "None"),
}
"""What turns a value into one of a type, and the type in words."""
WORDS = {
    " (command line)": "",
    "--from STEP": "resume_step=STEP",
    "with --column": "by hpclm preprocess --column",
    "with --json-keys": "by hpclm preprocess --json-keys",
}
"""Words of the command line in messages, and what they are in Python."""


def checked(function: Function) -> Function:
    """``function`` for users: ConfigError for arguments whose type is not the annotated one, messages in the words of Python, and an
    interrupt in one line."""
    kinds, expected = dict(_kinds(function)), signature(function)
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := [word for word in kwargs if word not in expected.parameters]:
            raise ConfigError([_unknown(word, name, function) for word in unknown])
        try:
            bound = expected.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}") from None
        problems = []
        for argument in bound.arguments.keys() & kinds.keys():
            try:
                bound.arguments[argument] = _fitted(bound.arguments[argument], kinds[argument])
            except values.UnfitError:
                wanted = " or ".join(map(_described, kinds[argument]))
                problems.append(f"{argument}={shown(bound.arguments[argument])} must be {wanted}")
        if problems:
            raise ConfigError(sorted(problems, key=lambda problem: [*kinds].index(problem.partition("=")[0])))
        try:
            return function(*bound.args, **bound.kwargs)
        except ConfigError as error:
            raise ConfigError(map(_in_python, error.problems)) from None
        except OSError as error:
            if error.errno not in (*MACHINE, *REFUSED):
                raise
            kind = HpclmError if error.errno in MACHINE else ConfigError
            raise kind(
                f"{terminal.line(shown(error.filename))}: {error.strerror}; check what it is, and its permissions"
            ) from error
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"{name} was interrupted") from None
        except HpclmError:
            raise
        except Exception as error:
            if reason := import_errors.explained(error):
                raise ConfigError(reason) from None
            raise

    return cast(Function, call)


def _unknown(argument: str, name: str, function: Callable[..., Any]) -> str:
    parameters = signature(function).parameters
    problem, near = f"{name} has no argument {argument!r}", hint(argument, parameters)
    if near or "changes" not in parameters:
        return f"{problem}.{near}"
    found = [*elsewhere.answers(argument)]
    if len(found) > 1 or any(answer.reason for answer in found):
        return f"{problem}: {elsewhere.explained(argument)}"
    keys = elsewhere.keys(found[0].settings) if found else [hints.nearest(argument, fields.keys()) or "optim.lr"]
    return f"{problem}; settings are given as {{{', '.join(f'{key!r}: ...' for key in keys)}}}"


def _in_python(problem: str) -> str:
    for words, meant in WORDS.items():
        problem = problem.replace(words, meant)
    return terminal.line(problem)


def positive(**numbers: float | None) -> None:
    """ConfigError for numbers that are not more than 0."""
    if problems := [
        f"{name}={value} must be more than 0" for name, value in numbers.items() if value is not None and not value > 0
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


def _fitted(value: Any, kinds: tuple[Any, ...]) -> Any:
    """``value`` as the first of ``kinds`` that it can be; UnfitError if it can be none."""
    simple = [KINDS[kind][0] for kind in kinds if kind in KINDS and not (kind is str and os.PathLike[str] in kinds)]
    for convert in simple:
        with suppress(values.UnfitError):
            return convert(value)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices and (chosen := values.text(value)) in choices:
        return chosen
    raise values.UnfitError


def _described(kind: Any) -> str:
    return f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else KINDS[kind][1]
