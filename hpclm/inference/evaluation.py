"""Measures how well a run's model performs tasks, or predicts held-out data, a text or a dataset.

Libraries that take seconds to import are imported after errors in the settings have been reported.
"""

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpclm.base import extras, log
from hpclm.inference import texts
from hpclm.node import secrets
from hpclm.node.job import OwnJob
from hpclm.rundir import config_history, metrics_file, runs
from hpclm.rundir.rows import finite
from hpclm.rundir.state import StateOf

Figures = dict[str, float | int | str]


@dataclass(frozen=True)
class TaskRequest:
    """Tasks of lm-evaluation-harness, and how to score them."""

    names: Sequence[str]
    path: str | None = None
    """A folder of the user's task files."""
    samples: int | None = None
    """Documents of each task; None: all."""
    shots: int | None = None
    """Examples before each question; None: the task's default."""
    batch: int = 16
    """Number of texts in a batch of the model."""


@dataclass(frozen=True)
class TaskScores:
    """The scores of a checkpoint: by task and metric, with the number of documents of each task, and the step."""

    tasks: Mapping[str, Mapping[str, float]]
    samples: Mapping[str, int]
    step: int

    def values(self) -> dict[str, Any]:
        """The scores for programs."""
        return {
            "tasks": {task: finite(row) for task, row in self.tasks.items()},
            "samples": self.samples,
            "step": self.step,
        }

    def lines(self) -> Iterator[str]:
        """The scores for people, one line for each metric."""
        for task, row in self.tasks.items():
            for metric, value in row.items():
                name, comma, filtered = metric.partition(",")
                score = f"{value:.4f}"
                error = row.get(f"{name}_stderr{comma}{filtered}")
                if error is not None:
                    score += f" ± {error:.4f}"
                if "_stderr" not in metric:
                    yield f"{task}  {metric} {score}  step {self.step}"


def on_tasks(run: Path, overrides: list[str], wanted: TaskRequest, ema: bool = False) -> TaskScores:
    """Score the newest checkpoint on tasks. ``ema``: the average of its weights (optim.ema)."""
    from hpclm.inference import run_settings, task_names

    config = run_settings.checked_settings(run, overrides, reads_text=True)
    task_names.check_task_names(list(wanted.names), wanted.path)

    from hpclm.inference import run_model
    from hpclm.preprocess import run_text

    with extras.needed_for("evaluation on tasks"):
        from hpclm.inference.harness import Tasks, naming_tasks
    text = run_text.of_run(run, config.data, config.model.vocab_size)
    tasks = Tasks(list(wanted.names), wanted.path, wanted.samples, wanted.shots)
    compute = run_model.place(config)
    model, progress = run_model.load_model(run, config, text.tokenizer.fingerprint, compute, ema)
    # lm-evaluation-harness ends its worker processes with SIGTERM, and would wait for workers that ignore it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with naming_tasks():
        scores, samples = tasks.score(model.to(compute.dtype), text, wanted.batch)
    return TaskScores(scores, samples, progress.step)


def follow(run: Path, overrides: list[str], wanted: TaskRequest, state_of: StateOf, job: OwnJob) -> int:
    """Score each checkpoint of ``run`` as it is published, until the run has ended.

    Returns the exit code: 85 after a signal; the same command then continues. ``state_of``: gives the run's state. ``job``: the job of
    this process.
    """
    from hpclm.inference import run_settings, task_names

    run_settings.inference_settings(run, overrides)  # before imports that take seconds
    task_names.check_task_names(list(wanted.names), wanted.path)

    with extras.needed_for("evaluation on tasks"):
        from hpclm.inference.follow import Follower
        from hpclm.inference.harness import Tasks
    runs.check_own(run, "scored")
    log.setup(0, redact=secrets.Redactor())
    tasks = Tasks(list(wanted.names), wanted.path, wanted.samples, wanted.shots)
    with metrics_file.scoring(run):
        return Follower(run, overrides, tasks, wanted.batch).until_the_end(state_of, job)


def on_part(run: Path, overrides: list[str], part: str, samples: int | None, ema: bool = False) -> Figures:
    """Mean loss per token in nats, perplexity, bits per byte if the bytes of the data are known, and the data that was read.

    ``samples``: number of samples of the part to read; None: one pass. ``ema``: measure the average of the weights (optim.ema). ConfigError
    if the loss is not finite.
    """
    from hpclm.base.errors import ConfigError
    from hpclm.data import sources, split_by
    from hpclm.inference import run_settings

    config = run_settings.checked_settings(run, overrides, reads_text=False)
    config = split_by.resolved(config, partial(config_history.split_by, Path(config.out)))
    source = sources.build_source(config.data, config.model, config.seed)

    from hpclm.base.progress import Bar
    from hpclm.data.batches import Batches
    from hpclm.engine.step import mean_loss
    from hpclm.inference import run_model
    from hpclm.inference.scoring import perplexity
    from hpclm.parallel.mesh import SINGLE

    compute = run_model.place(config)
    model, progress = run_model.load_model(run, config, source.fingerprint.get("tokenizer"), compute, ema)
    read = source.samples(part, samples)
    count = len(read) if samples is None else samples
    plan = config.plan()
    batches = Batches(read, plan, config.data, config.model, source.eod, compute).take(0, count)
    with Bar(batches, total=-(-count // plan.micro_size), unit="batch", disable=None) as bar:
        mean = mean_loss(model, bar, compute.device, SINGLE)
    if mean is None:
        raise ConfigError(
            f"nothing to measure: the loss mask excludes every token of the {count} samples of {part}; read more with --samples, or all "
            "tokens with data.loss_mask=ignore"
        )
    figures: Figures = {"loss": mean, "perplexity": perplexity(mean)}
    bits = sources.bits_per_byte(source, part)
    if bits is not None:
        figures["bits_per_byte"] = bits * mean
    return _finite({**figures, "step": progress.step, "part": part, "samples": count})


def on_documents(
    run: Path,
    overrides: list[str],
    text: str | None,
    prefix: str | None,
    max_tokens: int | None,
    format: str | None = None,
    ema: bool = False,
) -> Figures:
    """Loss, perplexity and bits per byte of the file ``text``, or else of the dataset ``prefix``. With a loss mask, only tokens that count
    in training are scored, and bits per byte are omitted.

    ``max_tokens``: tokens after which to stop. ``format``: format of the text, "text" or "jsonl". ``ema``: measure the average of the
    weights (optim.ema). ConfigError if the loss is not finite.
    """
    from hpclm.base.errors import ConfigError
    from hpclm.data import indexed, loss_mask, tokenizer_folder
    from hpclm.inference import run_settings

    content = "" if text is None else texts.text_of(text)
    config = run_settings.checked_settings(run, overrides, reads_text=text is not None)
    data = config.data
    if prefix is not None:  # only this dataset; a tokenizer named in the settings stays
        data = replace(data, source="indexed", prefix=prefix, blend=[], train=[], valid=[], test=[], validation=[])
    tokenizer = None
    try:
        folder = tokenizer_folder.of_run(run, data) if text is not None else tokenizer_folder.of_data(data)
        tokenizer = folder.build()
    except ConfigError:
        if text is not None:
            raise
    if text is not None and tokenizer is not None:
        json_lines = texts.is_json_lines(text, content, format, "text")
    else:
        dataset = indexed.IndexedDataset(Path(prefix or ""))
        mask = loss_mask.opened(dataset, replace(data, order="packed"))  # the order that training with a mask requires

    from hpclm.base.progress import Bar
    from hpclm.inference import run_model, scoring
    from hpclm.preprocess import run_text

    fingerprint = None
    begin = None
    of_run = None
    if tokenizer is not None:
        fingerprint = tokenizer.fingerprint
        of_run = run_text.of_folder(folder, config.model.vocab_size, tokenizer)
        begin = of_run.begin
    source: Figures = {"source": text or prefix or ""}
    if text is not None and of_run is not None:
        documents = scoring.of_text(text, content, json_lines, of_run)
    else:
        documents = scoring.of_dataset(dataset, mask, tokenizer)
        if mask is not None:
            source["loss_mask"] = str(mask.prefix)
    compute = run_model.place(config)
    model, progress = run_model.load_model(run, config, fingerprint, compute, ema)
    with Bar(total=max_tokens, unit="token", unit_scale=True, disable=None) as bar:
        score = scoring.score(model, documents, begin, config.batch.micro_size, max_tokens, bar)
    return _finite({**score.result(progress), **source})


def _finite(figures: Figures) -> Figures:
    """Return ``figures``; ConfigError if the loss is not finite."""
    if not math.isfinite(float(figures["loss"])):
        from hpclm.base.errors import ConfigError
        from hpclm.inference.generation import NOT_FINITE

        raise ConfigError(f"the loss is {figures['loss']}: {NOT_FINITE}")
    return figures
