"""Read files of torch.save that contain only data: tensors, containers, and a few types for settings.

A pickle names classes and functions to call. Only those listed below are allowed; a file that names others is refused.
"""

import re
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpclm.base import files
from hpclm.base.errors import ConfigError

REPLACED = re.compile(r"(megatron|deepspeed|pathlib)\.[\w.]+|_io\.BytesIO")
"""Classes in Megatron's files that hold neither weights nor settings: never imported, but replaced by ``StandIn``."""
NOT_READ = (
    RuntimeError, EOFError, KeyError, IndexError, ValueError, AttributeError, TypeError, AssertionError,
)  # fmt: skip
"""Exceptions of torch.load for a file that torch.save has not written."""
ARRAYS = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")


class StandIn:
    """Replaces an object of a class that is not imported; keeps the value of enum members."""

    def __init__(self, *arguments: Any):
        self.value = arguments[0] if len(arguments) == 1 else None

    def __setstate__(self, state: Any) -> None:
        self.value = None


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch.save file that holds a dictionary of tensors."""
    saved = load(path)
    if not isinstance(saved, dict) or not all(isinstance(x, Tensor) for x in saved.values()):
        raise ConfigError(f"{path} is not a dictionary of tensors")
    return saved


def load(path: Path) -> Any:
    """Load a torch.save file, memory-mapped; ConfigError if it contains anything but data."""
    files.readable(path, "weights file")
    with refused(str(path)):
        mapped = zipfile.is_zipfile(path)  # files from before PyTorch 1.6 are not zip files
        with torch.serialization.safe_globals([*_allowed(path, mapped)]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


@contextmanager
def refused(path: str) -> Iterator[None]:
    """Raise ConfigError if torch.load finds anything but data, or no data at all."""
    try:
        yield
    except UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+) (?:was not an allowed global|whose module)", str(error))
        why = f"it names {named[1]}, which is not data" if named else str(error).splitlines()[-1]
        raise ConfigError(f"{path} is refused: {why}") from None
    except NOT_READ as error:
        raise ConfigError(f"{path} is not a torch.save file: {str(error).splitlines()[0]}") from None


def _allowed(path: Path, listed: bool) -> Iterable[Any]:
    """The classes that may be constructed, and ``StandIn`` for those in REPLACED. ``listed``: PyTorch can list the file's classes."""
    array = np.empty(0, np.uint32).__reduce__()[0]
    yield from (Namespace, np.ndarray, np.dtype, type(np.dtype(np.uint32)), *((array, name) for name in ARRAYS))
    if listed:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        yield from ((StandIn, name) for name in named if REPLACED.fullmatch(name))
