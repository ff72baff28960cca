"""The model card of an export, README.md: how to load it, what it was trained on and how, and what came of it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpclm import __version__
from hpclm.data import tokenizers
from hpclm.interop.run import RunCheckpoint
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


def written(checkpoint: RunCheckpoint, name: str, architecture: str, own_code: bool, tokenizer: bool) -> str:
    """The card of an export called ``name``; ``own_code``: its class comes with it, ``tokenizer``: so does its tokenizer.

    Folders of this machine are not named.
    """
    config, step = checkpoint.config, checkpoint.step
    past = history.read(checkpoint.run)
    size = count.parameters(replace(config.model, vocab_multiple=1))  # the padding of the vocabulary is not exported
    parts = [
        HEAD,
        f"# {_line(config.name)}\n",
        f"A language model ({architecture}) of {size:,} parameters, exported by hpclm {__version__} from the checkpoint of step "
        f"{step:,}.\n",
        "## Use\n",
        _use(name, own_code, tokenizer),
        "## Results\n",
        _table(_results(checkpoint, past)),
        "## Data\n",
        _table(_data(checkpoint)),
        "## Training\n",
        _table(_training(checkpoint)),
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


def _results(checkpoint: RunCheckpoint, past: History) -> Iterator[Row]:
    step, context = checkpoint.step, checkpoint.config.model.context
    yield "steps", f"{step:,}"
    yield "tokens seen", f"{int(checkpoint.manifest.progress.get('samples', 0)) * context:,}"
    losses = [row["loss"] for row in past.steps if row["step"] <= step and row["loss"] is not None][-LAST:]
    if losses:
        yield f"training loss, mean of the last {len(losses)} steps", f"{sum(losses) / len(losses):.4f}"
    newest = {row.get("part", "valid"): row for row in past.evaluations if row["step"] <= step}
    for part, row in newest.items():
        if row["validation_loss"] is not None:
            yield f"loss on {part}, step {row['step']:,}", f"{row['validation_loss']:.4f}"
    for row in [row for row in past.tasks if row["step"] <= step][-1:]:
        for task, scores in row["tasks"].items():
            for metric, value in scores.items():
                if value is not None:
                    yield f"{task}, {metric}, step {row['step']:,}", f"{value:.4f}"


def _data(checkpoint: RunCheckpoint) -> Iterator[Row]:
    data, known = checkpoint.config.data, checkpoint.manifest.fingerprint.get("data", {})
    if not known:
        yield "source", "not known: the weights were imported"
        return
    if data.source != "indexed":
        yield "source", data.source
    prefixes, weights = data.prefixes(), known.get("weights")
    weighted = isinstance(weights, list) and len(weights) == len(prefixes)
    for number, prefix in enumerate(prefixes):
        yield "dataset", Path(prefix).name + (f", weight {weights[number]:g}" if weighted else "")
    if data.prefix or data.blend:
        yield "split", data.split
    if known.get("tokenizer"):
        yield "tokenizer", tokenizers.describe(known["tokenizer"])


def _training(checkpoint: RunCheckpoint) -> Iterator[Row]:
    config, made = checkpoint.config, checkpoint.manifest.made
    if not checkpoint.step:
        yield "steps", "0: the weights were imported, or are initial ones"
        return
    yield "sequence length", config.model.context
    for name in ("batch", "optim"):
        section = vars(getattr(config, name))
        yield from ((f"{name}.{key}", value) for key, value in section.items() if value is not None)
    yield "engine.precision", config.engine.precision
    yield "seed", config.seed
    yield "time", f"{checkpoint.manifest.progress.get('seconds', 0.0) / 60:.1f} minutes in training steps"
    if "processes" in made:
        yield "processes", f"{made['processes']}, engine {made.get('engine')}"
    yield "saved", f"{made.get('time', '')} by hpclm {made.get('hpclm', '')}"


def _table(rows: Iterable[Row]) -> str:
    lines = [f"| {_line(key)} | {_line(value)} |" for key, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _line(value: Any) -> str:
    """A value inside a table: one line without Markdown's marks."""
    text = "".join(char if char.isprintable() else " " for char in str(value))
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
