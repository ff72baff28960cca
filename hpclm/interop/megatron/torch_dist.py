"""Megatron-core's torch_dist checkpoints: PyTorch's distributed format (DCP), read without running its pickles.

.metadata says for each tensor its shape, its chunks, and the file and bytes of each chunk; *.distcp files have the chunks, each
as torch.save writes it; common.pt has the arguments and the optimizer's step count. A tensor of all layers has them stacked
along its first dimension. Chunks are merged, so it does not matter how the run was split.
"""

import io
import logging
import math
import os
import pickle
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.interop.megatron.layout import NO_WEIGHTS, MegatronState
from hpclm.interop.pickles import load, tensor_of
from hpclm.optim.optimizers import MATRIX, OPTIMIZERS

log = logging.getLogger(__name__)
LARGEST = 1 << 31  # bytes of .metadata
DATA_ONLY = re.compile(r"torch\.distributed\.(checkpoint|_shard)(\.\w+)*|megatron(\.\w+)*")
"""Modules whose classes describe tensors here; they are replaced by a ``Record``, and never imported."""
STACKED = re.compile(r"((?:encoder|transformer|decoder)\.layers)\.(?!\d)(.+)")
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
NO_TENSORS = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state")
MOMENTS = OPTIMIZERS["adamw"].state(MATRIX)
MOST = 1 << 20  # tensors of single layers; the largest networks have thousands


class Record:
    """Replaces an object of a class that is not imported: its arguments and its state."""

    def __init__(self, *words: Any):
        self.words = words

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Unpickler(pickle.Unpickler):
    """Makes containers, numbers, texts and ``Record``s, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle names."""
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if DATA_ONLY.fullmatch(module) or (module, name) == ("torch.serialization", "_get_layout"):
            return Record
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data")


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, and where its bytes are."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def layers(self, first: int, count: int) -> Tensor:
        """``count`` entries along the first dimension, from ``first`` on; ConfigError if chunks of them are missing."""
        wanted = (count, *self.shape[1:])
        inside = [
            (chunk, max(first, chunk.start[0]), min(first + count, chunk.start[0] + chunk.size[0]))
            for chunk in self.chunks
        ]
        inside = [(chunk, low, high) for chunk, low, high in inside if low < high]
        filled = sum((high - low) * math.prod(chunk.size[1:]) for chunk, low, high in inside)
        if not inside or filled != math.prod(wanted):
            raise ConfigError(f"{self.name}: its chunks hold {filled} of {math.prod(wanted)} values")
        found = None
        for chunk, low, high in inside:
            piece = _read(chunk, self.name)[low - chunk.start[0] : high - chunk.start[0]]
            found = torch.empty(wanted, dtype=piece.dtype) if found is None else found
            ends = zip(chunk.start[1:], chunk.size[1:], strict=True)
            found[tuple([slice(low - first, high - first), *(slice(a, a + n) for a, n in ends)])] = piece
        assert found is not None
        return found


class Parts(Mapping[str, list[Tensor]]):
    """Tensors by Megatron-core's names with layer numbers, each in one part, read when they are asked for."""

    def __init__(self, stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]):
        """``shapes``: of the weights, which the optimizer may keep in another form."""
        self._stored, self._shapes = stored, shapes
        self._keys: dict[str, tuple[str, int | None]] = {}
        if (count := sum(shapes[key][0] for key in stored if STACKED.fullmatch(key))) > MOST:
            raise ConfigError(f".metadata describes {count} tensors of layers; at most {MOST} are read")
        for key in stored:
            stack = STACKED.fullmatch(key)
            for layer in range(shapes[key][0] if stack else 0):
                self._keys[f"{stack[1]}.{layer}.{stack[2]}" if stack else key] = (key, layer)
            if not stack:
                self._keys[key] = (key, None)

    def __getitem__(self, name: str) -> list[Tensor]:
        key, layer = self._keys[name]
        stored, shape = self._stored[key], self._shapes[key]
        if stored.shape == shape:
            return [stored.layers(0, shape[0]) if layer is None else stored.layers(layer, 1)[0]]
        return [_unflattened(stored, shape, layer)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _unflattened(stored: Stored, shape: tuple[int, ...], layer: int | None) -> Tensor:
    """A tensor, or one layer of it, that the distributed optimizer of Megatron-core before 0.15 has flattened.

    It kept [blocks along each dimension …, values of a block].
    """
    blocks, size = stored.shape[:-1], stored.shape[-1]
    fits = len(blocks) == len(shape) and all(n and not whole % n for whole, n in zip(shape, blocks, strict=True))
    if not fits or math.prod(stored.shape) != math.prod(shape) or (layer is not None and blocks[0] != shape[0]):
        raise ConfigError(f"{stored.name} has shape {list(stored.shape)}, but the weight has {list(shape)}")
    first, count = (0, blocks[0]) if layer is None else (layer, 1)
    block = [whole // n for whole, n in zip(shape, blocks, strict=True)]
    found = stored.layers(first, count).reshape(count, *blocks[1:], *block) if math.prod(block) == size else None
    if found is None:
        raise ConfigError(f"{stored.name} has blocks of {size} values, not of {math.prod(block)}")
    order = [axis for pair in zip(range(len(shape)), range(len(shape), 2 * len(shape)), strict=True) for axis in pair]
    whole = found.permute(order).reshape(count * block[0], *shape[1:])
    return whole if layer is None else whole[0]


def read(folder: Path) -> MegatronState:
    """The checkpoint in ``folder``; ConfigError if it is incomplete, or contains anything but data."""
    stored = _metadata(folder)
    weights = {key: one for key, one in stored.items() if not (NO_TENSORS.match(key) or NO_WEIGHTS.search(key))}
    shapes = {key: one.shape for key, one in weights.items()}
    kept: dict[str, dict[str, Stored]] = {}
    for key, one in stored.items():
        if (found := STATE.fullmatch(key)) and found[2] in shapes:
            kept.setdefault(found[1], {})[found[2]] = one
    common = load(folder / "common.pt") if (folder / "common.pt").is_file() else {}
    common = common if isinstance(common, dict) else {}
    args = common.get("args")
    exact = {**weights, **kept.get("param", {}), **kept.get("fp32_param", {})}  # the fp32 weights of a bf16 run
    state = MegatronState(Parts(exact, shapes), args if isinstance(args, Namespace) else None)
    steps = _steps(common.get("optimizer"))
    if steps and all(kept.get(moment, {}).keys() >= weights.keys() for moment in MOMENTS):
        state.moments = {moment: Parts(kept[moment], shapes) for moment in MOMENTS}
        state.steps = steps
        state.iteration = _whole(common.get("iteration"))
    elif any(re.match(r"(chained_\d+\.)?optimizer\.", key) for key in stored) or "optimizer" in common:
        log.warning(
            "%s: only the weights are imported, since its optimizer state is in a form that only fits the run that saved it; save once "
            "with --dist-ckpt-optim-fully-reshardable to import that too",
            folder,
        )
    return state


def _metadata(folder: Path) -> dict[str, Stored]:
    path = folder / ".metadata"
    if not path.is_file():
        raise ConfigError(f"{folder} has no .metadata: it was not saved completely")
    try:
        root = _Unpickler(io.BytesIO(files.read_bytes(path, LARGEST))).load()
        places = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): place
            for index, place in root.storage_data.items()
            if isinstance(index.fqn, str)
        }
        tensors = [(name, one) for name, one in root.state_dict_metadata.items() if hasattr(one, "chunks")]
        return {str(name): _stored(folder, str(name), one, places) for name, one in tensors}
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path} is refused: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, TypeError, ValueError, LookupError, EOFError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is not the metadata of a checkpoint: {error}") from None


def _stored(folder: Path, name: str, one: Any, places: Mapping[Any, Any]) -> Stored:
    shape = _sizes(one.size)
    chunks = []
    for each in one.chunks:
        start, size = _sizes(each.offsets), _sizes(each.sizes)
        place = places[name, start]
        if not len(start) == len(size) == len(shape) or any(
            a + n > whole for a, n, whole in zip(start, size, shape, strict=True)
        ):
            raise ValueError(f"{name} has a chunk outside its shape")
        if Path(place.relative_path).name != place.relative_path or getattr(place, "transform_descriptors", None):
            raise ValueError(f"{name} is in another folder, or compressed")
        offset, length = _sizes((place.offset, place.length))
        if math.prod(size) > length:  # a value takes at least a byte
            raise ValueError(f"{name} has a chunk of {math.prod(size)} values in {length} bytes")
        chunks.append(Chunk(start, size, folder / place.relative_path, offset, length))
    if not shape:
        return Stored(name, (1,), tuple(Chunk((0,), (1,), c.path, c.offset, c.length) for c in chunks))
    return Stored(name, shape, tuple(chunks))


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and 0 <= value < 1 << 48 for value in found):
        raise ValueError(f"{found} are not sizes")
    return found


def _read(chunk: Chunk, name: str) -> Tensor:
    """The values of a chunk; ConfigError if its bytes are anything but a tensor of its size."""
    try:
        with os.fdopen(files.opened(chunk.path), "rb") as file:
            if chunk.offset + chunk.length > os.fstat(file.fileno()).st_size:
                raise ConfigError(f"{chunk.path} is too short for {name}: it was not copied completely")
            file.seek(chunk.offset)
            data = file.read(chunk.length)
    except OSError as error:
        raise ConfigError(f"{chunk.path} cannot be read: {error.strerror}") from None
    values = tensor_of(data, f"{chunk.path} ({name})")
    if values.numel() != math.prod(chunk.size):
        raise ConfigError(f"{chunk.path} does not hold {math.prod(chunk.size)} values of {name} where .metadata says")
    return values.reshape(chunk.size)


def _steps(optimizer: Any) -> int:
    """The optimizer's step count; 0 if it is not there."""
    if not isinstance(optimizer, dict):
        return 0
    state = optimizer.get("state")
    groups = optimizer.get("param_groups")
    counts = [state.get("common_step")] if isinstance(state, dict) else []
    counts += [group.get("step") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    given = next((_whole(count) for count in counts if _whole(count)), 0)
    return given or next((steps for inner in optimizer.values() if (steps := _steps(inner))), 0)


def _whole(value: Any) -> int:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return int(number) if isinstance(number, int | float) and math.isfinite(number) and number > 0 else 0
