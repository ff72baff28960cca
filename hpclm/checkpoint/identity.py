"""Whether a run may go on from a checkpoint: what must not have changed since it was saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpclm.data.tokenizers import mismatch
from hpclm.errors import ConfigError


def check_identity(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ConfigError that lists what differs between the run that saved a checkpoint and the one that would go on from it."""
    wrong = [] if (clash := tokenizer_clash(saved, now.get("data", {}).get("tokenizer"))) is None else [clash]
    wrong += differences(saved, now)
    if wrong:
        raise ConfigError([f"{folder} belongs to another run; set it back, or give another out=:", *wrong])


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities but for their tokenizers, a sentence each."""
    before, after = ({k: v for k, v in _leaves(tree).items() if "data.tokenizer" not in k} for tree in (saved, now))
    return [
        f"{key} was {before.get(key)!r} and is now {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def tokenizer_clash(saved: Mapping[str, Any], tokenizer: Mapping[str, Any] | None) -> str | None:
    """How the tokenizer of a checkpoint's identity and another differ, naming both; None where one is not known."""
    known = saved.get("data", {}).get("tokenizer")
    clash = mismatch(known, dict(tokenizer)) if known and tokenizer else None
    return clash and f"the checkpoint's tokenizer is another: {clash}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
