"""Suggest the right setting for an unknown one, by its name in hpclm or in another project."""

import re
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher, get_close_matches

from hpclm.config.peers import ACCUMULATION, PEERS, WITHOUT

SECTIONS = {
    "model": "network transformer architecture arch gpt llama",
    "data": "dataset datasets dataloader tokenizer",
    "optim": "optimizer optimization scheduler lr_scheduler adam",
    "scaler": "fp16 loss_scaler amp",
    "parallel": "parallelism distributed mesh",
    "engine": "deepspeed zero zero_optimization fsdp backend strategy",
    "evaluate": "eval evaluation validation val valid",
    "checkpoint": "ckpt checkpoints checkpointing save",
    "log": "logging logger metrics tensorboard",
    "job": "slurm launcher launch cluster",
}
"""Names of the sections in other projects."""
NEAR = 0.8  # minimum similarity of a misspelt name
HERE = 0.05  # bonus for names in the section that was typed


def hint(key: str, known: Sequence[str]) -> str:
    """The end of a message about ``key``, which is not in ``known`` (dotted keys)."""
    found = meant(key, known, WITHOUT)
    if found is None:
        return ". See hpclm config --reference for all settings."
    return f": {WITHOUT[found]}" if found in WITHOUT else f". Did you mean {found!r}?"


def is_variable(key: str) -> bool:
    """Whether ``key`` is written as environment variables are."""
    return re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", key) is not None


def is_accumulation(key: str, known: Sequence[str]) -> bool:
    """Whether ``key`` is, or is like, another project's name for the number of accumulated micro-batches."""
    return meant(key, known, WITHOUT) in ACCUMULATION


def meant(key: str, known: Sequence[str], more: Collection[str] = ()) -> str | None:
    """The best match for ``key`` in ``known`` (perhaps as key=value) or ``more``; None if there is none."""
    name = key.lstrip("-").replace("-", "_").lower()
    last = name.rpartition(".")[2]
    pair = ".".join(name.split(".")[-2:])
    whole = PEERS.get(pair) if "." in pair else None  # fp16.enabled is not our checkpoint.enabled
    exact = whole or _ours(name, known) or _theirs(name) or (last if last in more else None)
    return exact or _misspelt(name, known, more)


def _ours(name: str, known: Sequence[str]) -> str | None:
    """The setting with that last name, in the section closest to the given one."""
    section, _, last = name.rpartition(".")
    found = [key for key in known if key.rpartition(".")[2] == last]
    if len(found) <= 1:
        return found[0] if found else None
    owner = _section(section)
    inside = [key for key in found if key.rpartition(".")[0] == owner]
    return (inside or get_close_matches(name, found, n=1, cutoff=0.0))[0]


def _theirs(name: str) -> str | None:
    """The setting that another project calls ``name``, with or without its first sections."""
    parts = name.split(".")
    tails = (".".join(parts[start:]) for start in range(len(parts)))
    return next((PEERS[tail] for tail in tails if tail in PEERS), None)


def _misspelt(name: str, known: Sequence[str], more: Collection[str]) -> str | None:
    """The setting, or the one of ``more``, that is spelled most similarly."""
    section, _, last = name.rpartition(".")
    owner, scored = _section(section), [(0.0, "")]
    for word, ours in ({each: each for each in more} | PEERS | {key: key for key in known}).items():
        near = _similarity(word.rpartition(".")[2], last)
        if near >= NEAR - HERE:
            scored.append((near + HERE * (ours.rpartition(".")[0] == owner), ours))
    similarity, found = max(scored)
    return found if similarity >= NEAR else None


def _similarity(one: str, other: str) -> float:
    matcher = SequenceMatcher(None, one, other)
    return matcher.ratio() if matcher.quick_ratio() >= NEAR - HERE else 0.0


def _section(name: str) -> str:
    """The section that ``name`` refers to; "" if there is none."""
    last = name.rpartition(".")[2]
    found = next((ours for ours, theirs in SECTIONS.items() if last == ours or last in theirs.split()), None)
    return found or next(iter(get_close_matches(last, [*SECTIONS, "batch", "budget", "cluster"], n=1, cutoff=NEAR)), "")
