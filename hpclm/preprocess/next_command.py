"""The training command for a new dataset: a preset, and settings that adapt it to the dataset."""

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpclm import config
from hpclm.base import paths
from hpclm.config import BatchConfig
from hpclm.data.indexed import IndexedDataset
from hpclm.data.order import samples_in, split_bounds
from hpclm.preprocess.encode import tokenizer_of
from hpclm.preprocess.options import PreprocessRequest

LARGE = "gpt2-124m"
SMALL = "small"
"""Presets in configs/."""
LARGE_FROM = 100_000_000  # training tokens; with fewer, a model of GPT-2's size only memorises them
TRAIN_ONLY = "data.split=1"
SPLITS: tuple[list[str], ...] = ([], ["data.split=90,10"], ["data.split=90,10", "data.split_by=tokens"], [TRAIN_ONLY])
"""Settings that divide a dataset; the first entry that leaves enough text for validation is used."""
EPOCHS = 10
TUNING_EPOCHS = 3
STEPS = 10  # minimum number of steps of a run
SHORTEST = 8  # tokens of a sample; shorter ones teach little more than which token follows which
WARMUP = 1 / 20  # fraction of the steps

Choice = tuple[list[str], int, int | None]
"""Settings, and the tokens of the training and validation data; None: without validation."""


def after(request: PreprocessRequest) -> str:
    """The command to run after preprocessing."""
    prefixes = [corpus.prefixes[0] for corpus in request.corpora]
    if request.job.chat or request.model:
        return next_tuning_command(prefixes[0], request.model or "RUN", request.job.chat is not None)
    return next_command(prefixes, tokenizer_of(request.job).size)


def next_command(prefixes: Sequence[Path], vocab_size: int) -> str:
    """``hpclm train PRESET ...`` for one dataset, or for train, valid, ... datasets; with too few tokens, advice to add text."""
    vocabulary = f"model.vocab_size={vocab_size}"
    if len(prefixes) == 1:
        named = [f"data.prefix={paths.literal(prefixes[0])}", vocabulary]
        choices = _splits(prefixes[0])
    else:
        named = []
        choices = _parts(prefixes, vocabulary)
    for settings, train, valid in choices:
        preset = LARGE if train >= LARGE_FROM else SMALL
        changes = _changes(train, valid, preset)
        if changes is not None:
            return shlex.join(["hpclm", "train", preset, *named, *settings, *changes])
    min_tokens = SHORTEST * -(-STEPS * config.load(SMALL).batch.global_size // EPOCHS) + 1
    tokens = IndexedDataset(prefixes[0]).token_count
    return f"add text; {tokens:,} tokens are too few (a first run needs at least {min_tokens:,})"


def next_tuning_command(prefix: Path, run: str, chat: bool) -> str:
    """``hpclm train`` that continues from the weights of ``run``, with text or conversations."""
    words = [f"{paths.literal(run)}/config.yaml", "name=tuned", "out=runs/tuned"]
    words += [f"checkpoint.init_from={paths.literal(run)}", f"data.prefix={paths.literal(prefix)}"]
    if chat:
        words += ["data.order=packed", "data.reset_attention_mask=true", "data.reset_position_ids=true"]
    words += ["optim.lr=1e-5", "optim.min_lr=1e-6", f"budget.epochs={TUNING_EPOCHS}"]
    settings = config.of_run(Path(run), []) if Path(run).is_dir() else config.load()
    context = settings.model.context

    def samples(tokens: int) -> int:
        return -(-tokens // context) if chat else samples_in(tokens, context)

    for chosen, train, valid in _splits(prefix, chat):
        if samples(train) and (valid is None or samples(valid)):
            return shlex.join(
                ["hpclm", "train", *words, *chosen, *_smaller_batch(settings.batch, TUNING_EPOCHS * samples(train))]
            )
    tokens = IndexedDataset(prefix).token_count
    return f"add text; {tokens:,} tokens are too few for a sample of model.context={context}; import the model with a shorter context"


def _smaller_batch(batch: BatchConfig, samples: int) -> list[str]:
    """Batch settings that let ``samples`` last for several steps; empty if those of ``batch`` suffice."""
    size = batch.global_size
    micro = batch.micro_size
    while size > 1 and samples < STEPS * size:
        size //= 2
    if size == batch.global_size:
        return []
    changes = [f"batch.global_size={size}"]
    if micro != "auto":
        changes.append(f"batch.micro_size={math.gcd(size, micro)}")
    return changes


def dataset_settings(prefix: Path, vocab_size: int, context: int) -> list[str]:
    """Settings that let a run with samples of ``context`` tokens read one dataset, divided so that enough is left for validation."""
    named = [f"data.prefix={paths.literal(prefix)}", f"model.vocab_size={vocab_size}"]
    return next([*named, *words] for words, _, valid in _splits(prefix) if valid is None or samples_in(valid, context))


def _splits(prefix: Path, chat: bool = False) -> Iterator[Choice]:
    """Divisions of one dataset by data.split; conversations are not split."""
    dataset = IndexedDataset(prefix)
    for chosen in SPLITS:
        if chat and "data.split_by=tokens" in chosen:
            continue
        data = config.load(None, chosen).data
        if data.split_by == "tokens":
            train, valid, _ = (end - begin for begin, end in split_bounds(data.split, dataset.token_count))
        else:
            bounds = split_bounds(data.split, len(dataset), data.order)
            train, valid, _ = (dataset.place(end) - dataset.place(begin) for begin, end in bounds)
        yield chosen, train, None if chosen == [TRAIN_ONLY] else valid


def _parts(prefixes: Sequence[Path], vocabulary: str) -> Iterator[Choice]:
    """A dataset for each split, and further ones for validation."""
    parts = {part: [p for p in prefixes if p.name.startswith(part)] for part in ("train", "valid", "test")}
    settings = [f"data.{part}=[{named[0]}]" for part, named in parts.items() if named]
    more = [f"{prefix.name}={prefix}" for prefix in parts["valid"][1:]]
    if more:
        settings.append(f"data.validation=[{', '.join(more)}]")
    train = IndexedDataset((parts["train"] or prefixes)[0]).token_count
    shortest = min((IndexedDataset(prefix).token_count for prefix in parts["valid"]), default=None)
    yield [*settings, vocabulary], train, shortest
    yield [*settings, vocabulary, "evaluate.every=0"], train, None


def _changes(train: int, valid: int | None, preset: str) -> list[str] | None:
    """Changes to the preset: a shorter context, and a budget of a useful number of epochs; None for too few tokens."""
    defaults = config.load(preset)
    batch = defaults.batch.global_size
    context = defaults.model.context
    while context > 1 and EPOCHS * samples_in(train, context) < STEPS * batch:
        context //= 2
    if context < SHORTEST or (valid is not None and not samples_in(valid, context)):
        return None
    changes = []
    if context < defaults.model.context:
        changes.append(f"model.context={context}")
    per_epoch = samples_in(train, context)
    epochs = max(EPOCHS, -(-STEPS * batch // per_epoch))
    steps = epochs * per_epoch // batch
    if steps < (defaults.budget.steps or 0) and epochs != defaults.budget.epochs:
        changes.append(f"budget.epochs={epochs}")
        if defaults.optim.warmup > WARMUP * steps:
            changes.append(f"optim.warmup={int(WARMUP * steps)}")
    return changes
