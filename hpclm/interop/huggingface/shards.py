"""The safetensors files of a Hugging Face folder: one file, or several with an index."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hpclm import files
from hpclm.config.reading import json_object
from hpclm.errors import ConfigError, HpclmError
from hpclm.interop.pickles import Pickles

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class ShardWriter:
    """Writes tensors to files of at most ``limit`` bytes (at least one tensor each), with one file in memory."""

    def __init__(self, folder: Path, limit: float = math.inf):
        self.folder, self.limit = folder, limit
        self._pending: dict[str, Tensor] = {}
        self._size = self._total = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._size + size > self.limit:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._size, self._total = self._size + size, self._total + size

    def finish(self) -> None:
        """Write the last file, and rename all files, whose names contain their number."""
        self._flush()
        if len(self._files) == 1:
            self._part(0).rename(self.folder / WHOLE)
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._files):
            final = f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"
            self._part(number).rename(self.folder / final)
            where |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(where.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        path = self._part(len(self._files))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:  # raised for a full disk
            raise HpclmError(f"{path.name} could not be written: {error}") from error
        self._files.append(list(self._pending))
        self._pending, self._size = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f".part-{number:05d}"


class Reader:
    """The tensors of a Hugging Face folder, read on demand; ``pickle`` allows pytorch_model.bin."""

    def __init__(self, folder: Path, pickle: bool = False):
        self.folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._where: dict[str, str] = dict(self._listed(pickle))

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._where)

    def read(self, name: str) -> Tensor:
        """One tensor, whole."""
        tensor: Tensor = self._file(self._where[name]).get_tensor(name)
        return tensor

    def _listed(self, pickle: bool) -> Iterator[tuple[str, str]]:
        for index, whole, allowed in ((INDEX, WHOLE, True), (PICKLED_INDEX, PICKLED, pickle)):
            if allowed and (self.folder / index).exists():
                yield from self._indexed(self.folder / index)
                return
            if allowed and (self.folder / whole).exists():
                yield from ((name, whole) for name in self._file(whole).keys())  # noqa: SIM118 - it is not a dict
                return
        pickled = any((self.folder / name).exists() for name in (PICKLED, PICKLED_INDEX))
        raise ConfigError(
            f"{self.folder} has neither {WHOLE} nor {INDEX}"
            + (f"; --pickle reads its {PICKLED}, but only tensors" if pickled else "")
        )

    def _indexed(self, path: Path) -> Iterator[tuple[str, str]]:
        where = json_object(path).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(x, str) and Path(x).name == x for x in where.values()):
            raise ConfigError(f"{path} has no weight_map from names to files in the same folder")
        for file in sorted(set(where.values())):
            there = set(self._file(file).keys())
            lacking = [name for name, place in where.items() if place == file and name not in there]
            if lacking:
                raise ConfigError(f"{self.folder / file} lacks {', '.join(lacking[:5])}, which {path.name} says it has")
        yield from where.items()

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = files.readable(self.folder / name, "weights file")
            try:
                pickled = path.suffix == ".bin"
                opened: Any = Pickles(path) if pickled else safe_open(path, framework="pt")
                self._open[name] = opened if pickled else self._stack.enter_context(opened)
            except SafetensorError as error:
                raise ConfigError(f"{path} is not a safetensors file: {error}") from None
        return self._open[name]
