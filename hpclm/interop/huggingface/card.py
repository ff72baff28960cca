"""The model card of an export, README.md: how to load it, what it was trained on and how, and what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpclm import __version__
from hpclm.config import RunConfig
from hpclm.data import tokenizers
from hpclm.interop.run import Found
from hpclm.model import count
from hpclm.reporting import history
from hpclm.reporting.history import History

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- hpclm
---
"""
LAST = 100  # steps whose mean is the training loss
Row = tuple[str, Any]


def written(found: Found, name: str, architecture: str, own_code: bool, tokenizer: bool) -> str:
    """The card of an export called ``name``; ``own_code``: its class comes with it, ``tokenizer``: so does its tokenizer.

    Folders of this machine are not named.
    """
    config, step = found.config, found.step
    past = history.read(found.run)
    size = count.parameters(replace(config.model, vocab_multiple=1))  # the padding of the vocabulary is not exported
    parts = [
        HEAD,
        f"# {_line(config.name)}\n",
        f"A language model ({architecture}) of {size:,} parameters, exported by hpclm {__version__} from the checkpoint of step "
        f"{step:,}.\n",
        "## Use\n",
        _use(name, own_code, tokenizer),
        "## Results\n",
        _table(_results(found, past)),
        "## Data\n",
        _table(_data(found)),
        "## Training\n",
        _table(_training(found, config)),
        "## Network\n",
        _table((key, value) for key, value in vars(config.model).items() if value is not None),
    ]
    return "\n".join(parts)


def _use(name: str, own_code: bool, tokenizer: bool) -> str:
    more = ", trust_remote_code=True" if own_code else ""
    read = "Read `modeling_hpclm.py` before you load it: it is run.\n\n" if own_code else ""
    lines = ["from transformers import AutoModelForCausalLM" + ", AutoTokenizer" * tokenizer, ""]
    lines.append(f"model = AutoModelForCausalLM.from_pretrained({name!r}{more})")
    if tokenizer:
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained({name!r})",
            'ids = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)',
            "print(tokenizer.decode(model.generate(**ids, max_new_tokens=20)[0]))",
        ]
    without = "" if tokenizer else "\nThe run's tokenizer has no Hugging Face form, so none is here.\n"
    return f"{read}```python\n" + "\n".join(lines) + f"\n```\n{without}"


def _results(found: Found, past: History) -> Iterator[Row]:
    step, context = found.step, found.config.model.context
    yield "steps", f"{step:,}"
    yield "tokens seen", f"{int(found.manifest.progress.get('samples', 0)) * context:,}"
    losses = [row["loss"] for row in past.steps if row["step"] <= step and row["loss"] is not None][-LAST:]
    if losses:
        yield f"training loss, mean of the last {len(losses)} steps", f"{sum(losses) / len(losses):.4f}"
    measured = {row.get("part", "valid"): row for row in past.evaluations if row["step"] <= step}
    for part, row in measured.items():
        if row["validation_loss"] is not None:
            yield f"loss on {_line(part)}, step {row['step']:,}", f"{row['validation_loss']:.4f}"
    scores = [row for row in past.tasks if row["step"] <= step][-1:]
    for row in scores:
        for task, figures in row["tasks"].items():
            for metric, value in figures.items():
                if value is not None:
                    yield f"{_line(task)}, {_line(metric)}, step {row['step']:,}", f"{value:.4f}"


def _data(found: Found) -> Iterator[Row]:
    data, known = found.config.data, found.manifest.fingerprint.get("data", {})
    if not known:
        yield "source", "not known: the weights were imported"
        return
    if data.source != "indexed":
        yield "source", data.source
    for prefix, weight in _datasets(data.prefixes(), known.get("weights")):
        yield "dataset", Path(prefix).name + weight
    if data.prefix or data.blend:
        yield "split", data.split
    tokenizer = known.get("tokenizer")
    if tokenizer:
        yield "tokenizer", tokenizers.describe(tokenizer)


def _datasets(prefixes: Sequence[str], weights: Any) -> Iterator[tuple[str, str]]:
    shares = weights if isinstance(weights, list) and len(weights) == len(prefixes) else [None] * len(prefixes)
    for prefix, share in zip(prefixes, shares, strict=True):
        yield prefix, "" if share is None else f", weight {share:g}"


def _training(found: Found, config: RunConfig) -> Iterator[Row]:
    made, optim = found.manifest.made, config.optim
    if not found.step:
        yield "steps", "0: the weights were imported, or are initial ones"
        return
    yield "sequence length", config.model.context
    yield "batch size", f"{config.batch.global_size} sequences"
    if config.batch.rampup:
        yield "batch ramp-up", list(config.batch.rampup)
    yield (
        "optimizer",
        f"{optim.name}, betas {list(optim.betas)}, eps {optim.eps:g}, weight decay {optim.weight_decay:g}",
    )
    part = optim.warmup_fraction
    warmup = f"{optim.warmup:g} {optim.unit}" if part is None else f"{part:.3g} of the schedule's length"
    yield "learning rate", f"{optim.lr:g} to {optim.min_lr:g}, {optim.schedule}, warm-up {warmup}"
    yield "gradient clipping", optim.clip
    precision = config.engine.precision
    yield "precision", "bf16 on GPUs that have it, otherwise fp32" if precision == "auto" else precision
    yield "seed", config.seed
    seconds = found.manifest.progress.get("seconds", 0.0)
    long = f"{seconds / 3600:.2f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
    yield "time", f"{long} in training steps"
    layout = made.get("parallel")
    split = {key: value for key, value in layout.items() if value != 1} if isinstance(layout, Mapping) else {}
    shown = ", ".join(f"{key} {value}" for key, value in split.items() if key in ("tensor", "pipeline"))
    if "processes" in made:
        yield "processes", f"{made['processes']}, engine {made.get('engine')}{', ' + shown if shown else ''}"
    yield "saved", f"{made.get('time', '')} by hpclm {made.get('hpclm', '')}"


def _table(rows: Any) -> str:
    lines = [f"| {_line(key)} | {_line(value)} |" for key, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _line(value: Any) -> str:
    """A value inside a table: one line without Markdown's marks."""
    text = "".join(char if char.isprintable() else " " for char in str(value))
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
