"""The training command for a new dataset: a preset, and settings that adapt it to the dataset."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpclm import config
from hpclm.config import RunConfig
from hpclm.data.indexed import IndexedDataset
from hpclm.data.order import samples_in, split_bounds

LARGE, SMALL = "gpt2-124m", "small"
"""Presets in configs/."""
LARGE_FROM = 100_000_000  # training tokens; with fewer, a model of GPT-2's size only memorises them
SPLITS = (None, "9,1,0", "1")
"""None: the default of data.split. The first one that leaves enough for validation is used."""
EPOCHS = 10
STEPS = 10  # a run has at least
SHORTEST = 8  # tokens of a sample from which a model can learn more than which token follows which
WARMUP = 1 / 20  # of the steps


def next_command(prefixes: Sequence[Path], vocab_size: int) -> str:
    """``hpclm train PRESET ...`` for one dataset, or for train, valid, ... datasets; or how much more text it needs."""
    [train, *others] = prefixes
    vocabulary = f"model.vocab_size={vocab_size}"
    if not others:
        command = _of_whole([f"data.prefix={train}", vocabulary], train)
    else:
        parts = {part: [p for p in prefixes if p.name.startswith(part)] for part in ("train", "valid", "test")}
        settings = [f"data.{part}=[{found[0]}]" for part, found in parts.items() if found]
        more = [f"{prefix.name}={prefix}" for prefix in parts["valid"][1:]]
        settings += [f"data.validation=[{', '.join(more)}]"] if more else []
        train = (parts["train"] or [train])[0]
        shortest = min((IndexedDataset(prefix).token_count for prefix in parts["valid"]), default=None)
        command = _command([*settings, vocabulary], IndexedDataset(train).token_count, shortest, can_skip=True)
    if command:
        return shlex.join(command)
    batch = config.load(SMALL).batch.global_size
    least = SHORTEST * -(-STEPS * batch // EPOCHS) + 1
    return f"more text: {IndexedDataset(train).token_count:,} tokens are too few to train on; at least {least:,} make a first run"


def _of_whole(settings: list[str], prefix: Path) -> list[str] | None:
    """The command for a dataset that is split; None if it is too small."""
    sizes, data = IndexedDataset(prefix).sizes, config.DataConfig()
    for split in SPLITS:
        bounds = split_bounds(split or data.split, len(sizes), data.order)
        train, valid, _ = (int(sizes[begin:end].sum(dtype="i8")) for begin, end in bounds)
        chosen = [f"data.split={split}"] if split else []
        command = _command([*settings, *chosen], train, None if split == "1" else valid)
        if command:
            return command
    return None


def _command(settings: list[str], train: int, valid: int | None, can_skip: bool = False) -> list[str] | None:
    """The command for so many tokens (valid None: no validation data); None if they are too few.

    ``can_skip``: train without evaluations if the validation data are too short.
    """
    preset = LARGE if train >= LARGE_FROM else SMALL
    defaults = config.load(preset)
    context = _context(train, defaults)
    if context < SHORTEST:
        return None
    command = ["hpclm", "train", preset, *settings, *_budget(train, context, defaults)]
    if valid is None or samples_in(valid, context):
        return command
    return [*command, "evaluate.every=0"] if can_skip else None


def _context(tokens: int, defaults: RunConfig) -> int:
    """The preset's context, or a shorter one if the data has only a few samples of that length."""
    context = defaults.model.context
    while context > 1 and EPOCHS * samples_in(tokens, context) < STEPS * defaults.batch.global_size:
        context //= 2
    return context


def _budget(tokens: int, context: int, defaults: RunConfig) -> Iterator[str]:
    """Settings on top of the preset's: a shorter context, and a budget of a useful number of epochs."""
    batch, per_epoch = defaults.batch.global_size, samples_in(tokens, context)
    if context < defaults.model.context:
        yield f"model.context={context}"
    epochs = max(EPOCHS, -(-STEPS * batch // per_epoch))
    steps = epochs * per_epoch // batch
    if steps < (defaults.budget.steps or 0) and epochs != defaults.budget.epochs:
        yield f"budget.epochs={epochs}"
        if defaults.optim.warmup > WARMUP * steps:
            yield f"optim.warmup={int(WARMUP * steps)}"
