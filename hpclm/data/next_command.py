"""The training command for a new dataset: a preset, and settings that adapt it to the dataset."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpclm import config
from hpclm.config import RunConfig
from hpclm.data.disk.indexed import IndexedDataset
from hpclm.data.order import samples_in, split_bounds

LARGE, SMALL = "gpt2-124m", "small"
"""Presets in configs/."""
LARGE_FROM = 100_000_000  # training tokens; with fewer, a model of GPT-2's size only memorises them
SPLITS = (None, "9,1,0", "1")
"""None: the default of data.split. The first one that leaves enough for validation is used."""
PASSES = 10  # over the training data
STEPS = 10  # a run has at least
SHORTEST = 8  # tokens of a sample from which a model can learn more than which token follows which
WARMUP = 1 / 20  # of the steps


@dataclass(frozen=True)
class Tokens:
    """Tokens of the training and validation split; valid is None without validation data."""

    train: int
    valid: int | None


def train_command(train: Path, valid: Sequence[Path] | None, words: Sequence[str]) -> list[str] | None:
    """``hpclm train PRESET ...`` for the dataset ``train``, or None if it is ``too_small``.

    ``valid``: separate validation datasets; None: ``train`` is split. ``words`` name the data and the vocabulary.
    """
    if valid is not None:
        smallest = min((IndexedDataset(prefix).token_count for prefix in valid), default=None)
        return _command(Tokens(IndexedDataset(train).token_count, smallest), words, ["evaluate.every=0"])
    sizes = IndexedDataset(train).sizes
    for split in SPLITS:
        bounds = split_bounds(split or config.DataConfig().split, len(sizes), config.DataConfig().order)
        counts = [int(sizes[begin:end].sum(dtype="i8")) for begin, end in bounds]
        found = Tokens(counts[0], None if split == "1" else counts[1])
        command = _command(found, [*words, f"data.split={split}"] if split else words, None)
        if command:
            return command
    return None


def too_small(train: Path) -> str:
    """What to do about a dataset without a ``train_command``."""
    settings = config.load(SMALL)
    least = SHORTEST * -(-STEPS * settings.batch.global_size // PASSES) + 1
    return f"more text: {IndexedDataset(train).token_count:,} tokens are too few to train on; at least {least:,} make a first run"


def _command(tokens: Tokens, words: Sequence[str], without_validation: list[str] | None) -> list[str] | None:
    """The command for splits of these sizes; if validation data are too short, with ``without_validation``, or None."""
    preset = LARGE if tokens.train >= LARGE_FROM else SMALL
    settings = config.load(preset)
    context = _context(tokens.train, settings)
    if context < SHORTEST:
        return None
    fitted = list(_fitted(tokens.train, context, settings))
    if tokens.valid is not None and not samples_in(tokens.valid, context):
        if without_validation is None:
            return None
        fitted += without_validation
    return ["hpclm", "train", preset, *words, *fitted]


def _context(tokens: int, settings: RunConfig) -> int:
    """The preset's context, or a shorter one if the data has only a few samples of that length."""
    wanted, context = STEPS * settings.batch.global_size, settings.model.context
    while context > 1 and PASSES * samples_in(tokens, context) < wanted:
        context //= 2
    return context


def _fitted(tokens: int, context: int, settings: RunConfig) -> Iterator[str]:
    """Settings on top of the preset's: a shorter context, and a budget of a useful number of epochs."""
    batch, per_epoch = settings.batch.global_size, samples_in(tokens, context)
    if context < settings.model.context:
        yield f"model.context={context}"
    epochs = max(PASSES, -(-STEPS * batch // per_epoch))
    steps = epochs * per_epoch // batch
    if steps < (settings.budget.steps or 0) and epochs != settings.budget.epochs:
        yield f"budget.epochs={epochs}"
        if settings.optim.warmup > WARMUP * steps:
            yield f"optim.warmup={int(WARMUP * steps)}"
