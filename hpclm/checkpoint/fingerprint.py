"""The fingerprint of a run: facts that must not change when it is resumed from a checkpoint."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig, OptimConfig
from hpclm.config.checks import typed
from hpclm.config.experts import COEFFICIENTS
from hpclm.config.optimizers import row
from hpclm.config.section import leaves
from hpclm.data.tokenizers import mismatch

ADAMW = OptimConfig()
FREE = {"dropout", "attention.dropout", "init_std", "kernels", "attention.kernel", *COEFFICIENTS}
"""Model settings that may change when a run is resumed."""
NOT_THE_NETWORK = {"freeze"}
"""Model settings that may differ in a run that starts from the weights (checkpoint.init_from), but not when a run is resumed."""
WHY = {"batch.micro_size": ", and model.experts.balance_micro_batch, a loss over each micro-batch, depends on it"}
"""Reasons why a setting must not change, by its name, if not obvious."""
DATASET_DIFFERENCES = {
    "layout": "another layout",
    "dtype": "another type of tokens",
    "bin_bytes": "another number of tokens",
    **dict.fromkeys(("bin", "content"), "other tokens"),
    **dict.fromkeys(("idx", "idx_bytes"), "other sequences or documents"),
    **dict.fromkeys(("span", "tokens"), "another part in use (data.split, data.split_by)"),
    "loss_mask": "another loss mask (data.loss_mask)",
}
"""What differs between two datasets if this key of their fingerprints differs."""


def fingerprint(
    model: ModelConfig,
    seed: int,
    data: Mapping[str, Any] | None = None,
    optim: OptimConfig = ADAMW,
    micro_size: int | str | None = None,
) -> dict[str, Any]:
    """Facts that must not change when a run is resumed: the network, the seed, the data and their order, the optimizer's state, and with
    model.experts.balance_micro_batch the micro-batches.

    ``data``: the fingerprint of its source; None if unknown. ``micro_size``: samples of a micro-batch, or
    "auto" if a resumed run may choose another number; None if unknown.
    """
    shape = {key: value for key, value in leaves(model) if key not in FREE | NOT_THE_NETWORK}
    optimizer = {"name": row(optim.name).family or optim.name, "arguments": optim.arguments}
    identity: dict[str, Any] = {"model": shape, "model.freeze": model.freeze, "seed": seed, "optim": optimizer}
    if model.experts.count and model.experts.balance_micro_batch and micro_size:
        identity["batch"] = {"micro_size": micro_size}
    if data is not None:
        identity["data"] = data
    return identity


def of_read(fingerprint: dict[str, Any], phases: int) -> dict[str, Any]:
    """``fingerprint`` without the phases that have not been read; ``phases``: the number of those that have, the first one included."""
    data = fingerprint.get("data", {})
    if "phases" not in data:
        return fingerprint
    return {**fingerprint, "data": {**data, "phases": data["phases"][: max(phases - 1, 0)]}}


def network(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the network in a checkpoint's fingerprint, as they are in the phase that has been read last."""
    settings = dict(saved["model"])
    for phase in saved.get("data", {}).get("phases", ()):
        settings |= {key.removeprefix("model."): value for key, value in phase.items() if key.startswith("model.")}
    return settings


def check_fingerprint(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ConfigError that lists the differences between the run that saved a checkpoint and the one that would resume from it."""
    wrong = [*tokenizer_clash(saved, now.get("data", {}).get("tokenizer")), *differences(saved, now)]
    if wrong:
        head = f"{folder} was saved with another model, optimizer, data or seed, which must not change when a run is resumed"
        raise ConfigError(
            [f"{head}; revert the following settings, or start a new run in another folder (out):", *wrong]
        )


def tokenizer_clash(saved: Mapping[str, Any], tokenizer: Mapping[str, Any] | None) -> list[str]:
    """The difference between the tokenizer in a checkpoint's fingerprint and another, naming both; empty if one is unknown."""
    saved_tokenizer = saved.get("data", {}).get("tokenizer")
    if not saved_tokenizer or not tokenizer:
        return []
    clash = mismatch(saved_tokenizer, dict(tokenizer))
    return [f"the checkpoint's tokenizer is different: {clash}"] if clash else []


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two fingerprints, one sentence each, except for tokenizers."""
    if not ("batch" in saved and "batch" in now):  # balance_micro_batch may be switched on or off
        saved, now = ({key: value for key, value in given.items() if key != "batch"} for given in (saved, now))
    before = _leaves(saved)
    after = _leaves(now)
    read = before.pop("data.phases", [])
    planned = after.pop("data.phases", [])
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    return [
        *_phases(read, planned[: len(read)]),
        *(
            f"{key} was {typed(before.get(key))} and is now {typed(after.get(key))}{WHY.get(key, '')}"
            for key in changed
            if key != "data.datasets"
        ),
        *_datasets(before.get("data.datasets") or [], after.get("data.datasets") or []),
    ]


def _phases(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[str]:
    """The differences between the phases that have been read, one sentence each."""
    missing: dict[str, Any] = {}
    for number, (old, new) in enumerate(zip_longest(before, after, fillvalue=missing)):
        for key in {**old, **new}:
            if old.get(key) != new.get(key):
                change = f"was {typed(old.get(key))} and is now {typed(new.get(key))}"
                if key == "data.train":
                    change = "has other datasets or weights"
                yield f"data.phases[{number}] has been read: {key} {change}"


def _datasets(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[str]:
    """The differences between the training datasets, one sentence each."""
    if len(before) != len(after):
        yield f"data.prefix, data.train or data.blend: training datasets: {len(before)} before, {len(after)} now"
        return
    for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if None in (old.get("content"), new.get("content")):  # hashes may have been added since
            keys = [key for key in keys if key != "content"]
        if keys:
            which = "the training dataset" if len(before) == 1 else f"training dataset {number} of {len(before)}"
            yield f"{which} has {', '.join(dict.fromkeys(DATASET_DIFFERENCES.get(key, f'another {key}') for key in keys))}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value of nested mappings by its path, without the tokenizer's."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path == "data.tokenizer":
            continue
        if isinstance(value, Mapping):
            values |= _leaves(value, f"{path}.")
        else:
            values[path] = value
    return values
