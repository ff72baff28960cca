"""The safetensors files of a Hugging Face folder: one file, or several with an index."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hpclm.base import files
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.config.reading import json_object
from hpclm.interop import pickles

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"


def write(folder: Path, parts: Sequence[Iterable[tuple[str, Tensor]]]) -> None:
    """Write one file for each of ``parts`` (named tensors), with one part in memory at a time, and an index if there are several."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, 1):
        file = WHOLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in part}
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk raises it
            raise HpclmError(f"{file} could not be written: {error}") from error
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # respects the umask; save_file makes the file private
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class Reader:
    """The tensors of a Hugging Face folder, read on demand; ``pickle`` allows pytorch_model.bin."""

    def __init__(self, folder: Path, pickle: bool = False):
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._files: dict[str, str] = dict(self._listed(pickle))

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def read(self, name: str) -> Tensor:
        """The whole tensor ``name``."""
        file = self._file(self._files[name])
        tensor: Tensor = file[name] if isinstance(file, dict) else file.get_tensor(name)
        return tensor

    def _listed(self, pickle: bool) -> Iterator[tuple[str, str]]:
        for index, whole, allowed in ((INDEX, WHOLE, True), (PICKLED_INDEX, PICKLED, pickle)):
            if allowed and (self.folder / whole).exists():  # transformers ignores an index beside it
                yield from ((name, whole) for name in self._file(whole).keys())  # noqa: SIM118 - it is not a dict
                return
            if allowed and (self.folder / index).exists():
                yield from self._indexed(self.folder / index)
                return
        problem = f"{self.folder} has neither {WHOLE} nor {INDEX}"
        if any((self.folder / name).exists() for name in (PICKLED, PICKLED_INDEX)):
            problem += f"; --pickle reads its {PICKLED}, but only tensors"
        raise ConfigError(problem)

    def _indexed(self, path: Path) -> Iterator[tuple[str, str]]:
        weight_map = json_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(x, str) and Path(x).name == x for x in weight_map.values()
        ):
            raise ConfigError(f"{path} has no weight_map from names to files in the same folder")
        for file in sorted(set(weight_map.values())):
            there = set(self._file(file).keys())
            lacking = [name for name, place in weight_map.items() if place == file and name not in there]
            if lacking:
                raise ConfigError(f"{self.folder / file} lacks {', '.join(lacking[:5])}, which {path.name} says it has")
        yield from weight_map.items()

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = files.readable(self.folder / name, "weights file")
            try:
                self._open[name] = pickles.tensors(path) if path.suffix == ".bin" else safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ConfigError(f"{path} is not a safetensors file: {error}") from None
        return self._open[name]
