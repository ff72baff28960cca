"""Values that people pass in Python: NumPy's, PyTorch's, pandas' and omegaconf's, enums and paths, as Python's own."""

import operator
import os
from collections.abc import Callable, KeysView, Mapping, Sequence, ValuesView
from contextlib import suppress
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from hpclm.config.checks import MAX_INTEGER

BYTES = (bytes, bytearray, memoryview)


class UnfitError(Exception):
    """A value is not of the kind that an argument or a setting takes."""


def scalar(value: Any) -> Any:
    """``value``, or Python's own for an array or tensor without dimensions, and for an enum that is text."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except Exception:  # a tensor without data, or whatever a library's object raises
            return value
    return str.__str__(value) if isinstance(value, str) else value


def text(value: Any) -> str:
    """``value`` if it is text; UnfitError."""
    value = scalar(value)
    if not isinstance(value, str):
        raise UnfitError
    return value


def path(value: Any) -> str:
    """``value`` if it can name a file; UnfitError."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else scalar(value)
    if not isinstance(value, str) or "\0" in value:
        raise UnfitError
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise UnfitError from None
    return str.__str__(value)


def boolean(value: Any) -> bool:
    """``value`` if it is true or false; UnfitError."""
    value = scalar(value)
    if not isinstance(value, bool):
        raise UnfitError
    return value


def whole(value: Any) -> int:
    """``value`` as a whole number of at most 64 bits; UnfitError."""
    value = scalar(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UnfitError
    number = operator.index(value)
    if abs(number) > MAX_INTEGER:
        raise UnfitError
    return number


def number(value: Any) -> float:
    """``value`` as a float; UnfitError."""
    value = scalar(value)
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        raise UnfitError
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise UnfitError from None


def nothing(value: Any) -> None:
    """None; UnfitError for anything else."""
    if value is not None:
        raise UnfitError


def elements(value: Any) -> list[Any]:
    """The elements of a list, tuple, one-dimensional array, Series or view of a dict, in order; UnfitError for what has none, or no order."""
    if not isinstance(value, (str, *BYTES, Mapping)):
        if isinstance(value, (Sequence, KeysView, ValuesView)):
            return list(value)
        if getattr(value, "ndim", None) == 1 and callable(getattr(value, "tolist", None)):
            with suppress(Exception):  # a tensor without data
                return list(value.tolist())
    raise UnfitError


def texts(value: Any) -> list[str]:
    """``value`` if it is a list of texts, or another sequence of them; UnfitError."""
    return [text(element) for element in elements(value)]


def setting(value: Any) -> Any:
    """``value`` of a setting as None, text, a bool, number, list or dict; UnfitError."""
    value = scalar(value)
    if isinstance(value, Mapping):
        return {scalar(key): setting(inner) for key, inner in value.items()}
    if callable(getattr(value, "tolist", None)) and not isinstance(value, BYTES):
        value = value.tolist()  # of any number of dimensions
    kinds: tuple[Callable[[Any], Any], ...] = (nothing, text, path, boolean, _any_whole, number, elements)
    for kind in kinds:
        try:
            plain = kind(value)
        except UnfitError:
            continue
        return [setting(element) for element in plain] if kind is elements else plain
    raise UnfitError(type(value).__name__)


def _any_whole(value: Any) -> int:
    """An integer of any size, which the settings refuse by name if it is too large."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UnfitError
    return operator.index(value)
