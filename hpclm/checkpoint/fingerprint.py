"""The fingerprint of a run: what must not change when it is resumed from a checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm.config import ModelConfig, RunConfig
from hpclm.data.tokenizers import mismatch
from hpclm.errors import ConfigError

if TYPE_CHECKING:  # with numpy, and what reads datasets
    from hpclm.data.sources import Source

FREE = {"dropout", "attention_dropout", "init_std", "kernels", "attention"}
"""Model settings that may change when a run is resumed."""
APART = ("data.tokenizer", "data.datasets", "data.weights")
"""Compared by themselves."""
DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}
"""What a model setting was in a checkpoint from before it existed: a new setting's default changes nothing."""
KNOWN = {"layout", "dtype", "bin_bytes", "idx_bytes", "bin", "idx", "content", "span"}
"""Of a dataset."""


def fingerprint(config: RunConfig, source: "Source | None") -> dict[str, Any]:
    """What must not change when a run is resumed: the network, the seed, and with ``source`` the data and their order."""
    shape = {key: value for key, value in vars(config.model).items() if key not in FREE}
    found: dict[str, Any] = {"model": shape, "seed": config.seed}
    return found if source is None else found | {"data": source.fingerprint}


def check_fingerprint(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ConfigError that lists what differs between the run that saved a checkpoint and the one that would resume from it."""
    wrong = [] if (clash := tokenizer_clash(saved, now.get("data", {}).get("tokenizer"))) is None else [clash]
    wrong += differences(saved, now)
    if wrong:
        head = f"{folder} was saved with another model, data or seed, which must not change when a run is resumed"
        raise ConfigError([f"{head}; revert the following settings, or start a new run with another out=:", *wrong])


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two fingerprints, one sentence each, except for tokenizers."""
    if isinstance(held := saved.get("model"), Mapping):
        then = {name: DEFAULTS[name] for name in now.get("model", {}) if name in DEFAULTS}
        saved = {**saved, "model": {**then, **held}}
    sets = [_listed(tree.get("data"), "datasets") for tree in (saved, now)]
    weights = [_listed(tree.get("data"), "weights") for tree in (saved, now)]
    before, after = (
        {key: value for key, value in _leaves(tree).items() if not key.startswith(APART)} for tree in (saved, now)
    )
    return [
        *(
            f"{key} was {before.get(key)!r} and is now {after.get(key)!r}"
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        ),
        *_datasets(*sets),
        *(
            [f"the weights of the datasets were {weights[0]} and are now {weights[1]}"]
            if weights[0] != weights[1]
            else []
        ),
    ]


def _listed(data: Any, name: str) -> list[Any]:
    found = data.get(name) if isinstance(data, Mapping) else None
    return list(found) if isinstance(found, list) else []


def _datasets(before: list[Any], after: list[Any]) -> Iterator[str]:
    """What differs between the training datasets, one sentence each."""
    if len(before) != len(after):
        many = [f"{len(each)} dataset{'s' * (len(each) != 1)}" for each in (before, after)]
        yield f"data.prefix, data.train or data.blend: the training data were {many[0]} and are now {many[1]}"
        return
    for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
        which = "the training dataset" if len(before) == 1 else f"training dataset {number} of {len(before)}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from (f"{which} {how}" for how in _dataset(old, new))
        elif old != new:
            yield f"{which} was {old!r} and is now {new!r}"


def _dataset(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    differs = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    if None in (old.get("content"), new.get("content")):
        differs -= {"content"}  # hashes may have been added since
    for key, what in (("layout", "had the layout"), ("dtype", "had tokens of type")):
        if key in differs:
            yield f"{what} {old.get(key)}, and now has {new.get(key)}"
    if "bin_bytes" in differs:
        yield f"had {old.get('bin_bytes')} bytes of tokens, and now has {new.get('bin_bytes')}"
    elif differs & {"bin", "content"}:
        yield "has other tokens, of the same length"
    elif differs & {"idx", "idx_bytes"}:
        yield "is divided into other sequences or documents"
    if "span" in differs:
        yield f"was used from {_part(old)}, and is now used from {_part(new)}: data.split, or its length, has changed"
    if others := sorted(differs - KNOWN):
        yield f"differs in {', '.join(others)}"


def _part(dataset: Mapping[str, Any]) -> str:
    span = dataset.get("span")
    return "sequence {} to {}".format(*span) if isinstance(span, list) and len(span) == 2 else f"{span!r}"


def tokenizer_clash(saved: Mapping[str, Any], tokenizer: Mapping[str, Any] | None) -> str | None:
    """How the tokenizer in a checkpoint's fingerprint and another differ, naming both; None if one is unknown."""
    known = saved.get("data", {}).get("tokenizer")
    clash = mismatch(known, dict(tokenizer)) if known and tokenizer else None
    return clash and f"the checkpoint's tokenizer is different: {clash}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
