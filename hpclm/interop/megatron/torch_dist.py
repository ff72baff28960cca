"""Megatron-core's torch_dist checkpoints: PyTorch's distributed format (DCP), read without running its pickles.

.metadata gives the shape of each tensor, and where its chunks are. PyTorch reads and merges the chunks from the *.distcp files, whatever
the layout of the run was. common.pt has the arguments and the optimizer's step count. Layers of equal shape are
stacked in one tensor along its first dimension.
"""

import io
import logging
import math
import os
import pickle
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hpclm.base import files
from hpclm.base.errors import ConfigError, unread
from hpclm.config.optimizers import OPTIMIZERS
from hpclm.interop.megatron import experts
from hpclm.interop.megatron.layout import NO_WEIGHTS, MegatronState
from hpclm.interop.pickles import load, refused
from hpclm.parallel.placement import Placement

log = logging.getLogger(__name__)
MAX_METADATA_BYTES = 1 << 31  # bytes of .metadata
CLASSES = {
    "torch.distributed.checkpoint.metadata": "Metadata StorageMeta TensorStorageMetadata ChunkStorageMetadata TensorProperties "
    "BytesStorageMetadata MetadataIndex _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
}
"""The names allowed in a .metadata: classes without behaviour that describe tensors."""
IGNORED = re.compile(r"torch\.distributed\.(checkpoint|_shard)(\.\w+)*|megatron(\.\w+)*")
"""Modules with objects that no tensor depends on. Their names, except those in CLASSES, are replaced by ``Ignored`` without an import."""
STACKED = re.compile(r"((?:encoder|transformer|decoder)\.layers)\.(?!\d)(.+)")
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
NO_TENSORS = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state")
MOMENTS = OPTIMIZERS["adamw"].state(Placement(()))
MAX_LAYER_TENSORS = 1 << 20  # limit on tensors of single layers; the largest networks have thousands

Shape = tuple[int, ...]


class Ignored:
    """Replaces an object that no tensor depends on."""

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Creates containers, numbers, texts and descriptions of tensors; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class for a name in the pickle."""
        if name in CLASSES.get(module, "").split():
            return getattr(import_module(module), name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if IGNORED.fullmatch(module) or (module, name) == ("torch.serialization", "_get_layout"):
            return Ignored
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data")


def _read(folder: Path, metadata: Metadata, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors ``names``, each merged from its chunks; ConfigError if one cannot be read or contains anything but data."""
    described = {name: metadata.state_dict_metadata[name] for name in names}
    tensors = {  # values that no chunk holds stay NaN, which an import refuses
        name: torch.full(
            one.size, math.nan if one.properties.dtype.is_floating_point else 0, dtype=one.properties.dtype
        )
        for name, one in described.items()
        if isinstance(one, TensorStorageMetadata)
    }
    reader = FileSystemReader(folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    with refused(f"{folder}/*.distcp"):
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return tensors


def _parts(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> dict[str, list[Tensor]]:
    """Tensors by Megatron-core's names with layer numbers, each in one part.

    ``shapes``: shapes of the weights; the optimizer may store its tensors in another form.
    """
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            tensor = _unflattened(name, tensor, shapes[name])
        stack = STACKED.fullmatch(name)
        by_layer = {name: tensor}
        if stack:
            by_layer = {f"{stack[1]}.{layer}.{stack[2]}": one for layer, one in enumerate(tensor)}
        for layer_name, one in by_layer.items():
            parts |= {named: [part] for named, part in experts.unstacked(layer_name, one).items()}
    return parts


def _layer_tensors(name: str, shape: Shape) -> int:
    """Number of tensors of single layers or experts that are stacked in a tensor; 0 if it is not a stack."""
    dims = sum(pattern.fullmatch(name) is not None for pattern in (STACKED, experts.STACKED))
    return math.prod(shape[:dims]) if dims else 0


def _unflattened(name: str, stored: Tensor, shape: Shape) -> Tensor:
    """Restore a tensor [blocks along each dimension …, values] that the distributed optimizer of Megatron-core before 0.15 flattened."""
    blocks = stored.shape[:-1]
    fits = len(blocks) == len(shape) and all(n and not whole % n for whole, n in zip(shape, blocks, strict=True))
    if not fits or stored.numel() != math.prod(shape):
        raise ConfigError(f"{name} has shape {list(stored.shape)} in the optimizer, but the weight has {list(shape)}")
    inner = [whole // n for whole, n in zip(shape, blocks, strict=True)]
    order = [axis for pair in zip(range(len(shape)), range(len(shape), 2 * len(shape)), strict=True) for axis in pair]
    return stored.reshape(*blocks, *inner).permute(order).reshape(shape)


def read_torch_dist(folder: Path, weights_only: bool = False) -> MegatronState:
    """The checkpoint in ``folder``; ConfigError if it is incomplete or contains anything but data."""
    metadata = _metadata(folder)
    described: Mapping[str, Any] = metadata.state_dict_metadata
    weights = [key for key in described if not (NO_TENSORS.match(key) or NO_WEIGHTS.search(key))]
    shapes: dict[str, Shape] = {key: tuple(described[key].size) for key in weights}
    count = sum(_layer_tensors(key, shape) for key, shape in shapes.items())
    if count > MAX_LAYER_TENSORS:
        raise ConfigError(
            f"{folder / '.metadata'} describes {count} tensors of layers; at most {MAX_LAYER_TENSORS} are read"
        )
    kept: dict[str, dict[str, str]] = {}
    for key in described:
        named = STATE.fullmatch(key)
        if named and named[2] in shapes:
            flat = tuple(described[key].size) != shapes[named[2]]
            if flat and experts.STACKED.fullmatch(named[2]):  # GroupedMLP flattened transposed matrices
                continue
            kept.setdefault(named[1], {})[named[2]] = key
    common: dict[str, Any] = {}
    if (folder / "common.pt").is_file():
        loaded = load(folder / "common.pt")
        if isinstance(loaded, dict):
            common = loaded
    args = common.get("args")

    def parts(keys: Mapping[str, str]) -> dict[str, list[Tensor]]:
        tensors = _read(folder, metadata, keys.values())
        return _parts({name: tensors[key] for name, key in keys.items()}, shapes)

    # the fp32 weights of a bf16 run are in the optimizer
    exact = {key: key for key in weights} | kept.get("param", {}) | kept.get("fp32_param", {})
    state = MegatronState(parts(exact), args if isinstance(args, Namespace) else None)
    steps = _steps(common.get("optimizer"))
    if weights_only:
        return state
    trained = {key for key in shapes if not key.endswith(experts.CHOICE_BIAS)}
    if steps and all(kept.get(moment, {}).keys() >= trained for moment in MOMENTS):
        state.moments = {moment: parts(kept[moment]) for moment in MOMENTS}
        state.steps = steps
        state.iteration = _whole(common.get("iteration"))
    elif any(re.match(r"(chained_\d+\.)?optimizer\.", key) for key in described) or "optimizer" in common:
        log.warning(
            "%s: only the weights are imported, because the optimizer state fits only the layout of the run that saved it; to import "
            "the optimizer state too, save once with --dist-ckpt-optim-fully-reshardable",
            folder,
        )
    return state


def _metadata(folder: Path) -> Metadata:
    """The description of all tensors; ConfigError if files are missing, or are too small for the tensors."""
    path = folder / ".metadata"
    if not path.is_file():
        raise ConfigError(f"{folder} has no .metadata: it was not saved completely")
    ends: dict[str, int] = {}  # size that each file must have
    try:
        metadata = _Unpickler(io.BytesIO(files.read_bytes(path, MAX_METADATA_BYTES))).load()
        tensors: Any = {
            name: one for name, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)
        }
        described = sum(math.prod(_sizes(one.size)) * one.properties.dtype.itemsize for one in tensors.values())
        for place in metadata.storage_data.values():
            file = place.relative_path
            if Path(file).name != file or getattr(place, "transform_descriptors", None):
                raise ValueError(f"{file} is in another folder, or compressed")
            ends[file] = max(ends.get(file, 0), sum(_sizes((place.offset, place.length))))
        checked = Metadata(tensors, storage_data=metadata.storage_data)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path} is refused: {error}") from None
    except OSError as error:
        raise unread(error, path) from None
    except (AttributeError, TypeError, ValueError, LookupError, EOFError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is not the metadata of a checkpoint: {error}") from None
    for file, end in ends.items():
        try:
            with files.reader(folder / file) as opened:
                size = os.fstat(opened.fileno()).st_size
        except OSError as error:
            raise unread(error, folder / file) from None
        if size < end:
            raise ConfigError(f"{folder / file} is too short, {size} of {end} bytes: it was not copied completely")
    if sum(ends.values()) < described:  # a small file would otherwise allocate any amount of memory
        raise ConfigError(f"{path} describes {described} bytes of tensors, but the files have {sum(ends.values())}")
    return checked


def _sizes(values: Iterable[Any]) -> Shape:
    sizes = tuple(values)
    if not all(type(value) is int and value >= 0 for value in sizes):
        raise ValueError(f"{sizes} are not sizes")
    return sizes


def _steps(optimizer: Any) -> int:
    """The optimizer's step count; 0 if unknown."""
    if not isinstance(optimizer, dict):
        return 0
    state = optimizer.get("state")
    groups = optimizer.get("param_groups")
    counts = []
    if isinstance(state, dict):
        counts.append(state.get("common_step"))
    if isinstance(groups, list):
        counts += [group.get("step") for group in groups if isinstance(group, dict)]
    for steps in (*map(_whole, counts), *map(_steps, optimizer.values())):
        if steps:
            return steps
    return 0


def _whole(value: Any) -> int:
    """A positive number as an int; 0 for any other value."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, int | float) and math.isfinite(value) and value > 0:
        return int(value)
    return 0
