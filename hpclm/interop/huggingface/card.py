"""The model card of an export, README.md: how to load the model, its results, and its data and settings."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpclm import __version__
from hpclm.config import RunConfig
from hpclm.config.section import leaves
from hpclm.data import tokenizers
from hpclm.interop.run import RunCheckpoint
from hpclm.model import count
from hpclm.preprocess.run_text import RunText
from hpclm.reporting import history

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- hpclm
---"""
LAST = 100  # the training loss is the mean of this number of steps
ALWAYS = {
    "model": {"vocab_size", "layers", "hidden", "attention.heads", "context", "positions", "norm", "activation"},
    "batch": {"global_size"},
    "optim": {"name", "lr", "min_lr", "schedule", "betas", "weight_decay", "clip"},
}
"""Settings in every card; others appear only if they differ from the defaults."""
CONTINUED = ('ids = tokenizer(input("Prompt: "), return_tensors="pt", return_token_type_ids=False)',)
ASKED = (
    'messages = [{"role": "user", "content": input("Question: ")}]',
    'ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
)
"""Lines of the example in a card: CONTINUED completes a text, ASKED answers in a model tuned on conversations."""
Row = tuple[str, Any]


def written(
    checkpoint: RunCheckpoint, target: Path, architecture: str, own_code: bool, text: RunText | None, dtype: str
) -> str:
    """The card of an export to ``target`` with weights in ``dtype``. ``own_code``: whether the class is exported too.
    ``text``: the run's, if its tokenizer is.

    The card names no folders of this machine except those between the current folder and ``target``.
    """
    config = checkpoint.config
    size = count.described_size(
        replace(config.model, vocab_multiple=1)
    )  # the padding of the vocabulary is not exported
    about = (
        f"A language model ({architecture}) of {size}, exported by hpclm {__version__} from step {checkpoint.step:,}."
    )
    chat = text is not None and text.folder.template is not None
    tokens = min(20, config.model.context // 2)
    use = _use(_seen_from_here(target), own_code, text is not None, chat, tokens)
    parts = [HEAD, f"# {_line(checkpoint.run.absolute().name)}", about, "## Use", use]
    parts += ["## Results", _table(_results(checkpoint)), "## Data and settings", _table(_settings(checkpoint, dtype))]
    return "\n\n".join(parts) + "\n"


def _seen_from_here(target: Path) -> str:
    """The path of ``target`` from the current folder, or its name if it is elsewhere."""
    target = target.absolute()
    here = Path.cwd()
    return str(target.relative_to(here)) if target.is_relative_to(here) else target.name


def _use(path: str, own_code: bool, tokenizer: bool, chat: bool, tokens: int) -> str:
    arguments = repr(path)
    lines = [f"`{_line(path)}` is the path of this folder where it was exported; replace it with yours.", ""]
    if own_code:
        arguments += ", trust_remote_code=True"
        lines += ["Read `modeling_hpclm.py` before you load it: transformers runs it.", ""]
    loaded = f"model = AutoModelForCausalLM.from_pretrained({arguments})"
    if not tokenizer:
        lines += ["```python", "from transformers import AutoModelForCausalLM", "", loaded, "```"]
        lines += ["", "The run's tokenizer has no Hugging Face form and is not included."]
        return "\n".join(lines)
    lines += ["```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "", loaded]
    lines += [f"tokenizer = AutoTokenizer.from_pretrained({path!r})"]
    lines += ASKED if chat else CONTINUED
    lines += [f"print(tokenizer.decode(model.generate(**ids, max_new_tokens={tokens})[0]))", "```"]
    return "\n".join(lines)


def _results(checkpoint: RunCheckpoint) -> Iterator[Row]:
    step = checkpoint.step
    past = history.read_history(checkpoint.run)
    samples = int(checkpoint.manifest.progress.get("samples", 0))
    yield "steps", f"{step:,}"
    yield "tokens seen", f"{samples * checkpoint.config.model.context:,}"
    if checkpoint.ema:
        yield "weights", f"exponential moving average (optim.ema={checkpoint.config.optim.ema})"
    losses = past.steps["loss"][(past.steps["step"] <= step) & np.isfinite(past.steps["loss"])][-LAST:]
    if len(losses):
        yield f"training loss, mean of the last {len(losses)} steps", f"{losses.mean():.4f}"
    newest = {row.get("part", "valid"): row for row in past.evaluations if row["step"] <= step}
    figure = "validation_loss_ema" if checkpoint.ema else "validation_loss"
    for part, row in newest.items():
        if row.get(figure) is not None:
            yield f"loss on {part}, step {row['step']:,}", f"{row[figure]:.4f}"
    for row in [row for row in past.tasks if row["step"] <= step][-1:]:
        for task, scores in row["tasks"].items():
            measured = {metric: value for metric, value in scores.items() if value is not None}
            yield from (
                (f"{task}, {metric}, step {row['step']:,}", f"{value:.4f}") for metric, value in measured.items()
            )


def _settings(checkpoint: RunCheckpoint, dtype: str) -> Iterator[Row]:
    config = checkpoint.config
    fingerprint = checkpoint.manifest.fingerprint.get("data", {})
    if not fingerprint:
        yield "data", "unknown: the weights were imported"
    elif config.data.source != "indexed":
        yield "data", config.data.source
    else:
        yield from (("dataset", Path(prefix).name) for prefix in config.data.prefixes())
        if fingerprint.get("tokenizer"):
            yield "tokenizer", tokenizers.describe(fingerprint["tokenizer"])
    sections = ["model"]
    if checkpoint.step:
        sections += ["batch", "optim"]
    for name in sections:
        used = dict(leaves(getattr(config, name)))
        defaults = dict(leaves(getattr(RunConfig(), name)))
        yield from (
            (f"{name}.{key}", value)
            for key, value in used.items()
            if value != defaults[key] or key in ALWAYS.get(name, ())
        )
    yield f"other settings of {', '.join(sections)}", f"the defaults of hpclm {__version__}"
    if checkpoint.step:
        yield "engine.precision, as it ran", checkpoint.manifest.made.get("precision", config.engine.precision)
    yield "weights in these files", dtype
    yield "seed", config.seed


def _table(rows: Iterable[Row]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {_line(key)} | {_line(value)} |" for key, value in rows)])


def _line(value: Any) -> str:
    """A value for a table cell: one line without Markdown characters."""
    text = "".join(char if char.isprintable() else " " for char in str(value))
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
