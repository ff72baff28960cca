"""The files of a Megatron checkpoint, and the part of the network in each.

With a pipeline, Megatron-DeepSpeed saves a file for each layer and tensor-parallel rank, and a file with the settings. Without one, it
saves a file for each tensor-parallel rank. Megatron-LM saves a file for each tensor-, pipeline- and expert-parallel rank, with the
settings. An interleaved pipeline's parts are under model0, model1, …; the layers of part 0 on all stages come before those of part 1.
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hpclm.base import files
from hpclm.base.errors import ConfigError, unread
from hpclm.interop.megatron import experts
from hpclm.interop.megatron.options import argument
from hpclm.interop.pickles import load

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
DEEPSPEED_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
LAYER = re.compile(r"^(input_layernorm|self_attention|attention)\.")
"""Prefixes of names in a layer's file."""
NO_WEIGHTS = re.compile(r"(\._extra_state\d*|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq)$")
OUTER = re.compile(r"^(module\.)*(model\.)?(language_model\.)?")
MAX_TRACKER_BYTES = 1 << 10  # bytes of a file that names the newest checkpoint


@dataclass
class MegatronState:
    """The contents of a checkpoint."""

    parts: Mapping[str, list[Tensor]] = field(default_factory=dict)
    """Maps Megatron-core's tensor names, with global layer numbers, to the shards on the tensor-parallel ranks."""
    args: Namespace | None = None
    """The training arguments; None if the checkpoint has none."""
    version: float = 3.0
    """checkpoint_version, which determines the order in the fused projection."""
    unread: str | None = None
    """The reason why the arguments could not be read."""
    moments: Mapping[str, Mapping[str, list[Tensor]]] = field(default_factory=dict)
    """Adam's moments by their name and the weight's name, if imported."""
    steps: int = 0
    """Steps of the optimizer."""
    iteration: int = 0
    """Iteration of the run."""


def recognised(source: Path) -> Path | None:
    """The folder of a Megatron checkpoint: ``source``, or the newest checkpoint in it; None for other sources."""
    folder = source
    for note, pattern in (("latest_checkpointed_iteration.txt", "iter_{:07d}"), ("latest", None)):
        if (source / note).is_file():
            try:
                text = files.read_text(source / note, MAX_TRACKER_BYTES).strip()
            except OSError as error:
                raise unread(error, source / note) from None
            except UnicodeDecodeError as error:
                raise ConfigError(f"{source / note} cannot be read: {error}") from None
            named = pattern.format(int(text)) if pattern and re.fullmatch("[0-9]+", text) else text
            if Path(named).name != named:
                raise ConfigError(f"{source / note} must name a folder next to it, not {text!r}")
            folder = source / named
    if distributed(folder) or any(folder.glob("layer_*-model_*-model_states.pt")) or _rank_files(folder):
        return folder
    return None


def distributed(folder: Path) -> bool:
    """Whether ``folder`` is a torch_dist checkpoint."""
    return any(folder.glob("*.distcp"))


def read_files(folder: Path) -> MegatronState:
    """Read the checkpoint in ``folder``, which must not be a distributed one; tensors are memory-mapped."""
    return _layers(folder) if any(folder.glob("layer_*-model_*-model_states.pt")) else _ranks(folder)


def _layers(folder: Path) -> MegatronState:
    """Read Megatron-DeepSpeed's layer files; the names in a file reveal the kind of layer."""
    by_layer: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("layer_*")):
        match = LAYER_FILE.fullmatch(path.name)
        if not match:
            raise ConfigError(f"{path} is not a supported layer file; experts are not supported")
        by_layer.setdefault(int(match[1]), {})[int(match[2])] = path
    state = MegatronState()
    blocks = 0
    for paths in _complete(by_layer, folder):
        held = [_tensors(_saved(path)) for path in paths]
        names = held[0].keys()
        if any(LAYER.search(name) for name in names):
            prefix = f"decoder.layers.{blocks}."
            blocks += 1
        elif any(name.startswith("word_embeddings.") for name in names):
            prefix = "embedding."
            if "embedding.word_embeddings.weight" in state.parts:  # a copy, used as tied output projection
                continue
        elif names <= {"weight", "bias"} and all(tensor.ndim == 1 for tensor in held[0].values()):
            prefix = "decoder.final_layernorm."
        else:
            prefix = ""
        _add(state, {prefix + name: [part[name] for part in held if name in part] for name in names}, folder)
    for note in sorted(folder.glob("mp_rank_*_model_states.pt"))[:1]:
        try:
            saved = _saved(note)
            state.args = _args(saved)
            state.version = _version(saved, 3.0)
        except ConfigError as error:  # the layers may not need the arguments
            state.unread = str(error)
    return state


def _ranks(folder: Path) -> MegatronState:
    """Read rank files of Megatron-LM, or of Megatron-DeepSpeed without a pipeline."""
    opened = {ranks: (path, _saved(path)) for ranks, path in sorted(_rank_files(folder).items())}
    _, first = next(iter(opened.values()))
    # Megatron assumes version 0 if a file has none
    state = MegatronState(args=_args(first), version=_version(first, 0.0))
    stages: dict[int, dict[tuple[int, int], dict[Any, Any]]] = {}
    by_stage: dict[int, dict[int, Path]] = {}
    for (tensor, *others), (path, saved) in opened.items():
        stage, expert = _stage_and_expert(others, state.args)
        stages.setdefault(stage, {})[expert, tensor] = saved
        by_stage.setdefault(stage, {})[tensor] = path
    _complete(by_stage, folder)
    blocks = 0
    chunks = sorted(
        (key for key in first if re.fullmatch(r"model\d*|module", str(key))), key=lambda key: (len(key), key)
    )
    for key in chunks:
        for _, ranks in sorted(stages.items()):
            if not all(isinstance(saved.get(key), dict) for saved in ranks.values()):
                raise ConfigError(f"{folder} has files with a {key} that is not a dictionary")
            shards: dict[str, dict[int, Tensor]] = {}
            for (expert, tensor), saved in sorted(ranks.items()):
                for name, part in experts.of_rank(_tensors(saved[key]), state.args, expert).items():
                    shards.setdefault(name, {}).setdefault(tensor, part)
            there = {
                full(name, blocks): [part for _, part in sorted(by_rank.items())] for name, by_rank in shards.items()
            }
            _add(state, {name: parts for name, parts in there.items() if name is not None}, folder)
            numbers = [re.search(r"\blayers\.(\d+)\.", name) for name in shards]
            blocks += max((int(number[1]) for number in numbers if number), default=-1) + 1
    return state


def _rank_files(folder: Path) -> dict[tuple[int, ...], Path]:
    """The files by the numbers in their names, the first of which is the tensor-parallel rank."""
    by_ranks: dict[tuple[int, ...], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        numbers = RANK_FOLDER.fullmatch(path.name)
        file = next((path / name for name in RANK_FILES if (path / name).is_file()), None)
        if file and not numbers:
            raise ConfigError(f"{path} is not a supported rank folder")
        if file and numbers:
            by_ranks[tuple(int(number) for number in numbers.groups() if number)] = file
        rank = DEEPSPEED_FILE.fullmatch(path.name)
        if rank and path.is_file():
            by_ranks[(int(rank[1]),)] = path
    return by_ranks


def _stage_and_expert(numbers: Sequence[int], args: Namespace | None) -> tuple[int, int]:
    """The stage and the expert-parallel rank; Megatron-LM omits the number of a stage or rank if there is only one."""
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    [number] = numbers or [0]
    sizes = ("pipeline_model_parallel_size", "expert_model_parallel_size")
    stages, ranks = (argument(args, size, default=1) if args else 1 for size in sizes)
    return (0, number) if stages == 1 < ranks else (number, 0)


def _complete(parts: Mapping[int, Mapping[int, Path]], folder: Path) -> list[list[Path]]:
    """The files of each layer or stage, by tensor-parallel rank; ConfigError if a layer or stage lacks a rank that another has."""
    ranks = range(1 + max(rank for by_rank in parts.values() for rank in by_rank))
    for by_rank in parts.values():
        missing = set(ranks) - by_rank.keys()
        if missing:
            beside = by_rank[max(by_rank)].relative_to(folder)
            raise ConfigError(f"{folder} has no file of tensor-parallel rank {min(missing)} next to {beside}")
    return [[by_rank[rank] for rank in ranks] for _, by_rank in sorted(parts.items())]


def _add(state: MegatronState, parts: Mapping[str, list[Tensor]], folder: Path) -> None:
    twice = state.parts.keys() & parts.keys()
    if twice:
        raise ConfigError(f"{folder} contains {min(twice)} twice")
    state.parts = {**state.parts, **parts}


def _saved(path: Path) -> dict[Any, Any]:
    saved = load(path)
    if not isinstance(saved, dict):
        raise ConfigError(f"{path} does not contain a dictionary")
    return saved


def _args(saved: Mapping[str, Any]) -> Namespace | None:
    args = saved.get("args")
    return args if isinstance(args, Namespace) else None


def _version(saved: Mapping[str, Any], default: float) -> float:
    given = saved.get("checkpoint_version")
    if given is None:
        return default
    if not isinstance(given, int | float):
        raise ConfigError(f"checkpoint_version={given} is not a number")
    return float(given)


def _tensors(saved: Mapping[Any, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors in nested dictionaries, by their keys joined with dots."""
    flat: dict[str, Tensor] = {}
    for key, value in saved.items():
        if isinstance(value, Tensor):
            flat[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            flat |= _tensors(value, f"{prefix}{key}.")
    return flat


def full(name: str, first: int) -> str | None:
    """The global name of a tensor in a stage that begins with layer ``first``.

    None if the tensor is not a weight, or is the last stage's copy of the embedding.
    """
    name = OUTER.sub("", name)
    if NO_WEIGHTS.search(name) or name.startswith("word_embeddings_for_head."):
        return None
    return re.sub(r"\blayers\.(\d+)\.", lambda match: f"layers.{first + int(match[1])}.", name)
