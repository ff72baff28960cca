"""Files of torch.save, of which only plain data comes back: tensors, containers, and a few kinds that hold settings.

A pickle names classes and functions to call. None is imported or called here but those listed below; a file that names
another is refused.
"""

import re
import zipfile
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpclm import files
from hpclm.errors import ConfigError

STOOD_FOR = re.compile(r"(megatron|deepspeed|pathlib)\.[\w.]+|_io\.BytesIO")
"""What Megatron's files have beside weights and settings: a ``StandIn`` is made of each, and nothing is imported."""
ARRAYS = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")


class StandIn:
    """Stands for an object of a class that is not used here; keeps the value of an enumeration's member."""

    def __init__(self, *words: Any):
        self.value = words[0] if len(words) == 1 else None

    def __setstate__(self, state: Any) -> None:
        self.value = None


class Pickles:
    """The tensors of a file that holds a dictionary of them, as one of safetensors would give them."""

    def __init__(self, path: Path):
        found = load(path)
        if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
            raise ConfigError(f"{path} is no dictionary of tensors")
        self._found: dict[str, Tensor] = found

    def keys(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._found.keys()

    def get_tensor(self, name: str) -> Tensor:
        """One of them."""
        return self._found[name]


def load(path: Path) -> Any:
    """What a file of torch.save holds; tensors are mapped, not read. ConfigError where it holds more than data."""
    files.readable(path, "weights file")
    try:
        mapped = zipfile.is_zipfile(path)  # files from before PyTorch 1.6 are not
        with torch.serialization.safe_globals([*_allowed(path, mapped)]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+) (?:was not an allowed global|whose module)", str(error))
        why = f"it names {named[1]}, which is not data" if named else str(error).splitlines()[-1]
        raise ConfigError(f"{path} is not read: {why}") from None
    except (RuntimeError, EOFError, KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is no file of torch.save: {str(error).splitlines()[0]}") from None


def _allowed(path: Path, listed: bool) -> Iterable[Any]:
    """Classes that may be made, with a ``StandIn`` under other names."""
    array = np.empty(0, np.uint32).__reduce__()[0]
    yield from (Namespace, np.ndarray, np.dtype, type(np.dtype(np.uint32)), *((array, name) for name in ARRAYS))
    named = torch.serialization.get_unsafe_globals_in_checkpoint(path) if listed else []
    yield from ((StandIn, name) for name in named if STOOD_FOR.fullmatch(name))
