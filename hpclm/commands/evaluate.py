"""The verb ``hpclm evaluate``: how well a run's model predicts held-out data, a text or a dataset, or does at tasks."""

import argparse
import json
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpclm import extras, paths
from hpclm.inference import texts
from hpclm.parser import Parser
from hpclm.rundir import runs
from hpclm.rundir.rows import finite
from hpclm.terminal import say

Figures = dict[str, float | int | str]


def main(argv: list[str]) -> int:
    """``hpclm evaluate``."""
    options = parser()
    args = options.parse_intermixed_args(argv)  # settings may follow options
    if problem := next(_misused(args), None):
        options.error(problem)
    typed_run, args.run = args.run, runs.located(Path(paths.expanded(args.run)), args.runs)
    if args.follow:
        from hpclm.commands import follow as follower

        if args.submit:
            words = [word for word in argv if word not in ("--submit", typed_run)]
            return follower.submit(args, [paths.literal(args.run.absolute()), *words])
        return follower.main(args)
    if args.tasks is not None:
        _print_tasks(args)
        return 0
    if args.text or args.data:
        figures = on_documents(args.run, args.settings, args.text, args.data, args.tokens, args.format)
    else:
        figures = on_part(args.run, args.settings, args.part, args.samples)
    if args.json:
        print(json.dumps(finite(figures)))
    else:
        say(
            "  ".join(
                f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
                for name, value in figures.items()
            )
        )
    return 0


def parser() -> Parser:
    """The parser of ``hpclm evaluate``."""
    options = Parser(
        prog="hpclm evaluate",
        description="Measure a run's newest checkpoint: on its held-out data, on any text or dataset, or on tasks of "
        "lm-evaluation-harness.",
    )
    add = options.add_argument
    options.add_run(type=str)  # to be expanded, and named as it was typed
    options.add_runs_folder()
    other = "settings that differ from the run's own"
    options.add_settings(other, default=[])
    what = options.add_mutually_exclusive_group()
    parts = "valid, test, train, or valid/NAME of data.validation (default: valid)"
    what.add_argument("--part", default="valid", metavar="PART", help=parts)
    text = 'a text, or .jsonl with {"text": ...} on each line; - reads standard input'
    what.add_argument("--text", type=paths.option, metavar="FILE", help=text)
    add("--format", choices=["text", "jsonl"], help="with --text: what FILE holds; default: by its name and content")
    what.add_argument(
        "--data",
        type=paths.option,
        metavar="PREFIX",
        help="all sequences of a dataset made by hpclm preprocess; with a loss mask, the tokens that count in training",
    )
    tasks = "tasks of lm-evaluation-harness (pip install 'hpclm[lm-eval]')"
    what.add_argument("--tasks", metavar="A,B", help=tasks)
    add("--tasks-path", type=paths.option, metavar="DIR", help="with --tasks: a folder of task files of your own")
    add("--shots", type=int, help="with --tasks: examples before each question (default: the task's)")
    add("--batch", type=int, help="with --tasks: texts per batch (default: 16)")
    follow = (
        "with --tasks: score each checkpoint once, as the run publishes it, until the run has ended; scores go to its "
        "scores.jsonl, metrics.jsonl and sinks"
    )
    add("--follow", action="store_true", help=follow)
    submit = "with --follow: as a Slurm job of one process, with the run's own job settings; key=value changes them"
    add("--submit", action="store_true", help=submit)
    add("--tokens", type=int, help="with --text and --data: stop after about this many tokens")
    samples = "read this many samples (default: one pass over the part), or with --tasks documents of each task (default: all)"
    add("--samples", type=int, help=samples)
    add("--json", action="store_true", help="print one JSON object")
    return options


def _misused(args: argparse.Namespace) -> Iterator[str]:
    """Options that do not go together, or have no such values."""
    documents, tasks = bool(args.text or args.data), args.tasks is not None
    for name, least in (("samples", 1), ("tokens", 1), ("shots", 0), ("batch", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            yield f"--{name} must be at least {least}"
    if documents and args.samples is not None:
        yield "--samples is for --part and --tasks; use --tokens"
    if not documents and args.tokens is not None:
        yield "--tokens is for --text and --data; use --samples"
    if args.format and not args.text:
        yield "--format is for --text"
    if not tasks and not (args.tasks_path is args.shots is args.batch is None):
        yield "--tasks-path, --shots and --batch are for --tasks"
    if tasks and not all(args.tasks.split(",")):
        yield "--tasks must be names, separated by commas"
    if args.submit and not args.follow:
        yield "--submit is for --follow"
    if args.follow and (not tasks or args.json):
        yield "--follow is for --tasks, without --json"


def _print_tasks(args: argparse.Namespace) -> None:
    """Score the newest checkpoint at tasks: a line for each metric, or one JSON object."""
    from hpclm.inference import run_settings, task_names

    config = run_settings.check(args.run, args.settings, reads_text=True)
    task_names.check(args.tasks.split(","), args.tasks_path)

    from hpclm.datasets import run_text
    from hpclm.inference import run_model

    with extras.needed_for("evaluation on tasks"):
        from hpclm.inference.harness import Tasks, naming_tasks
    text = run_text.of_run(args.run, config.data, config.model.vocab_size)
    tasks = Tasks(args.tasks.split(","), args.tasks_path, args.samples, args.shots)
    compute = run_model.place(config)
    model, progress = run_model.load_model(args.run, config, text.tokenizer.fingerprint, compute)
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # the library ends its processes by it, and would wait where it is ignored
    with naming_tasks():
        scores, samples = tasks.score(model.to(compute.dtype), text, args.batch or 16)
    if args.json:
        rows = {task: finite(row) for task, row in scores.items()}
        print(json.dumps({"tasks": rows, "samples": samples, "step": progress.step}))
        return
    for task, row in scores.items():
        for metric, value in row.items():
            name, comma, filtered = metric.partition(",")
            error = row.get(f"{name}_stderr{comma}{filtered}")
            if "_stderr" not in metric:
                say(f"{task}  {metric} {value:.4f}{'' if error is None else f' ± {error:.4f}'}  step {progress.step}")


def on_part(run: Path, overrides: list[str], part: str, samples: int | None) -> Figures:
    """Mean loss per token in nats, perplexity, and what they were measured on.

    ``samples``: how many are read of the part; None: all of one pass. ConfigError if the loss is not finite.
    """
    from hpclm.data import sources
    from hpclm.errors import ConfigError
    from hpclm.inference import run_settings

    config = run_settings.check(run, overrides, reads_text=False)
    source = sources.build(config.data, config.model, config.seed)

    from hpclm.data.batches import Batches
    from hpclm.engine.step import mean_loss
    from hpclm.inference import run_model
    from hpclm.inference.scoring import perplexity
    from hpclm.parallel.mesh import SINGLE
    from hpclm.progress import Bar

    compute = run_model.place(config)
    model, progress = run_model.load_model(run, config, source.fingerprint.get("tokenizer"), compute)
    read = source.samples(part, samples)
    count = len(read) if samples is None else samples
    plan = config.plan()
    batches = Batches(read, plan, config.data, config.model, source.eod, compute).take(0, count)
    with Bar(batches, total=-(-count // plan.micro_size), unit="batch", disable=None) as bar:
        mean = mean_loss(model, bar, compute.device, SINGLE)
    if mean is None:
        raise ConfigError(
            f"nothing is measured: by the loss mask no token of the {count} samples of {part} counts; read more with --samples, or all "
            "tokens with data.loss_mask=ignore"
        )
    return _finite(
        {"loss": mean, "perplexity": perplexity(mean), "step": progress.step, "part": part, "samples": count}
    )


def on_documents(
    run: Path, overrides: list[str], text: str | None, prefix: str | None, most: int | None, format: str | None = None
) -> Figures:
    """Loss, perplexity and bits per byte of the file ``text``, or else of the dataset ``prefix``: with a loss mask of the tokens that
    count in training, without bits per byte.

    ``most``: tokens after which to stop; ``format``: of the text, "text" or "jsonl". ConfigError if the loss is not finite.
    """
    from hpclm.data import indexed, loss_mask, tokenizers
    from hpclm.errors import ConfigError
    from hpclm.inference import run_settings

    config = run_settings.check(run, overrides, reads_text=text is not None)
    data = config.data
    if prefix is not None:  # this dataset and no other; a tokenizer that the settings name stays
        data = replace(data, source="indexed", prefix=prefix, blend=[], train=[], valid=[], test=[], validation=[])
    tokenizer = None
    try:
        tokenizer = tokenizers.of_run(data)
    except ConfigError:
        if text is not None:
            raise
    if text is not None and tokenizer is not None:
        content = texts.text_of(text)
        json_lines = texts.is_json_lines(text, content, format, "text")
    else:
        dataset = indexed.IndexedDataset(Path(prefix or ""))
        mask = loss_mask.opened(dataset, replace(data, order="packed"))  # as a run that trains on it would

    from hpclm.datasets import run_text
    from hpclm.inference import run_model, scoring
    from hpclm.progress import Bar

    of_run = run_text.of_run(run, data, config.model.vocab_size, tokenizer) if tokenizer else None
    if text is not None and of_run is not None:
        documents = scoring.of_text(text, content, json_lines, of_run)
    else:
        documents = scoring.of_dataset(dataset, mask, tokenizer)
    compute = run_model.place(config)
    model, progress = run_model.load_model(run, config, tokenizer.fingerprint if tokenizer else None, compute)
    with Bar(total=most, unit="token", unit_scale=True, disable=None) as bar:
        score = scoring.score(model, documents, of_run.begin if of_run else None, config.batch.micro_size, most, bar)
    masked = {} if text is not None or mask is None else {"loss_mask": str(mask.prefix)}
    return _finite({**score.result(progress), "source": text or prefix or "", **masked})


def _finite(figures: Figures) -> Figures:
    """``figures``; ConfigError if the loss is not finite."""
    if not math.isfinite(float(figures["loss"])):
        from hpclm.errors import ConfigError
        from hpclm.inference.generation import NOT_FINITE

        raise ConfigError(f"the loss is {figures['loss']}: {NOT_FINITE}")
    return figures
