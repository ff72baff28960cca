"""Where Megatron's files are, which part of the network each holds, and what else they say.

Megatron-DeepSpeed's pipeline saves a file for each layer and tensor-parallel rank, and the settings apart; without the
pipeline it saves one for each tensor-parallel rank. Megatron-LM saves one for each tensor- and pipeline-parallel rank, with the
settings and, under model0, model1, …, the parts of an interleaved pipeline: part 0 of every stage comes before part 1 of the first.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hpclm.errors import ConfigError
from hpclm.interop.megatron.names import LAYER, full
from hpclm.interop.pickles import load

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
DEEPSPEED_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")


@dataclass
class State:
    """What a checkpoint holds."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    """Megatron-core's name of each tensor, layers counted over the whole network -> the parts of the tensor ranks."""
    args: Namespace | None = None
    """The settings it was trained with; None where they are not there."""
    version: float = 3.0
    """Of the order in the fused projection."""
    unread: str | None = None
    """Why the settings could not be read."""


def recognised(source: Path) -> Path | None:
    """The folder with the files of a checkpoint: ``source``, or what its note of the newest names; None for no Megatron."""
    folder = source
    for note, pattern in (("latest_checkpointed_iteration.txt", "iter_{:07d}"), ("latest", None)):
        if (source / note).is_file():
            text = (source / note).read_text(encoding="utf-8").strip()
            named = pattern.format(int(text)) if pattern and text.isdigit() else text
            if Path(named).name != named:
                raise ConfigError(f"{source / note} must name a folder beside it, not {text!r}")
            folder = source / named
    if any(folder.glob("*.distcp")):
        raise ConfigError(
            f"{folder} is in torch.distributed's format, which is not read here; have Megatron save it with --ckpt-format torch"
        )
    there = any(folder.glob("layer_*-model_*-model_states.pt")) or _rank_files(folder)
    return folder if there else None


def read(folder: Path) -> State:
    """The checkpoint in ``folder``; tensors are mapped, not read."""
    return _layers(folder) if any(folder.glob("layer_*-model_*-model_states.pt")) else _ranks(folder)


def _layers(folder: Path) -> State:
    """Megatron-DeepSpeed's: what a layer is shows in the names that its file has."""
    files: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("layer_*")):
        found = LAYER_FILE.fullmatch(path.name)
        if not found:
            raise ConfigError(f"{path} is of no layer that is known here; experts are not")
        files.setdefault(int(found[1]), {})[int(found[2])] = path
    state, blocks = State(), 0
    for _, by_rank in sorted(files.items()):
        held = [_tensors(load(path), path) for path in _complete(by_rank, folder)]
        names = held[0].keys()
        if any(LAYER.search(name) for name in names):
            prefix, blocks = f"decoder.layers.{blocks}.", blocks + 1
        elif any(name.startswith("word_embeddings.") for name in names):
            prefix = "embedding."
            if "embedding.word_embeddings.weight" in state.parts:  # the output projection, where it is the table itself
                continue
        elif names <= {"weight", "bias"} and all(tensor.ndim == 1 for tensor in held[0].values()):
            prefix = "decoder.final_layernorm."
        else:
            prefix = ""
        _add(state, {prefix + name: [part[name] for part in held if name in part] for name in names}, folder)
    note = next((p for p in sorted(folder.glob("mp_rank_*_model_states.pt"))), None)
    if note is not None:
        try:
            told = _mapping(load(note), note)
            state.args, state.version = _args(told), _version(told, 3.0)
        except ConfigError as error:  # the layers may do without it
            state.unread = str(error)
    return state


def _ranks(folder: Path) -> State:
    """Megatron-LM's, and Megatron-DeepSpeed's without a pipeline."""
    files = _rank_files(folder)
    stages: dict[int, dict[int, Path]] = {}
    for (tensor, stage), path in files.items():
        stages.setdefault(stage, {})[tensor] = path
    states = [
        [_mapping(load(path), path) for path in _complete(by_rank, folder)] for _, by_rank in sorted(stages.items())
    ]
    first = states[0][0]
    # Megatron itself takes a file that does not say its version for one of version 0
    state, blocks = State(args=_args(first), version=_version(first, 0.0)), 0
    chunks = sorted(
        (key for key in first if re.fullmatch(r"model\d*|module", str(key))), key=lambda key: (len(key), key)
    )
    for key in chunks:
        for number, ranks in enumerate(states):
            held = [_tensors(rank.get(key), files[0, sorted(stages)[number]]) for rank in ranks]
            there = {full(name, blocks): [part[name] for part in held if name in part] for name in held[0]}
            _add(state, {name: parts for name, parts in there.items() if name is not None}, folder)
            local = {int(found[1]) for name in held[0] if (found := re.search(r"\blayers\.(\d+)\.", name))}
            blocks += max(local, default=-1) + 1
    return state


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """(tensor rank, stage) -> its file."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*")):
        numbers = RANK_FOLDER.fullmatch(path.name)
        file = next((path / name for name in RANK_FILES if (path / name).is_file()), None)
        if file and not numbers:
            raise ConfigError(f"{path} is of no rank that is known here; experts are not")
        if file and numbers:
            found[int(numbers[1]), int(numbers[2] or 0)] = file
        if path.is_file() and (rank := DEEPSPEED_FILE.fullmatch(path.name)):
            found[int(rank[1]), 0] = path
    return found


def _complete(by_rank: Mapping[int, Path], folder: Path) -> list[Path]:
    missing = set(range(max(by_rank) + 1)) - by_rank.keys()
    if missing:
        raise ConfigError(f"{folder} has no file of tensor rank {min(missing)} beside {by_rank[max(by_rank)].name}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _add(state: State, found: Mapping[str, list[Tensor]], folder: Path) -> None:
    twice = state.parts.keys() & found.keys()
    if twice:
        raise ConfigError(f"{folder} has {min(twice)} twice")
    state.parts |= found


def _mapping(found: Any, path: Path) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no dictionary")
    return found


def _args(told: Mapping[str, Any]) -> Namespace | None:
    args = told.get("args")
    return args if isinstance(args, Namespace) else None


def _version(told: Mapping[str, Any], silent: float) -> float:
    """Of the checkpoint; ``silent`` where it does not say."""
    given = told.get("checkpoint_version")
    if given is not None and not isinstance(given, int | float):
        raise ConfigError(f"checkpoint_version={given} is no number")
    return silent if given is None else float(given)


def _tensors(found: Any, path: Path) -> dict[str, Tensor]:
    """The tensors of nested dictionaries, under names joined with dots."""
    flat: dict[str, Tensor] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            flat[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))

    walk(_mapping(found, path), "")
    return flat
