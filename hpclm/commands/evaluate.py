"""``hpclm evaluate``: measure a run's model on held-out data, a text, a dataset or tasks."""

import json
from pathlib import Path
from typing import Literal

from hpclm import config
from hpclm.base import paths
from hpclm.base.errors import UsageError
from hpclm.base.terminal import say
from hpclm.inference import evaluation
from hpclm.inference.evaluation import TaskRequest
from hpclm.launch import jobs
from hpclm.launch import submit as submission
from hpclm.launch.schedulers import current_job
from hpclm.parser import Parser, whole
from hpclm.rundir import runs
from hpclm.rundir.rows import finite

PATIENCE = 5.0  # time limit in seconds for a scheduler's answer


def main(
    run: str,
    runs_folder: Path,
    settings: list[str],
    part: str,
    text: str | None,
    format: Literal["text", "jsonl"] | None,
    data: str | None,
    tasks: str | None,
    tasks_path: str | None,
    shots: int | None,
    batch: int | None,
    follow: bool,
    submit: bool,
    tokens: int | None,
    samples: int | None,
    ema: bool,
    as_json: bool,
    typed: list[str],
) -> int:
    """Print the loss or the scores of a checkpoint, or score all checkpoints of a run."""
    documents = bool(text or data)
    if documents and samples is not None:
        raise UsageError("--samples is for --part and --tasks; use --tokens")
    if not documents and tokens is not None:
        raise UsageError("--tokens is for --text and --data; use --samples")
    if format and not text:
        raise UsageError("--format is for --text")
    if tasks is None and not (tasks_path is shots is batch is None):
        raise UsageError("--tasks-path, --shots and --batch are for --tasks")
    if submit and not follow:
        raise UsageError("--submit is for --follow")
    if follow and (tasks is None or as_json):
        raise UsageError("--follow is for --tasks, without --json")
    if follow and ema:
        raise UsageError("--follow scores the trained weights, without --ema")
    request = None if tasks is None else _tasks(tasks, tasks_path, samples, shots, batch)
    out = runs.located(Path(paths.expanded(run)), runs_folder)
    if request and submit:
        words = [word for word in typed if word not in ("--submit", run)]
        say(submission.submit_scoring(out, settings, request, words))
        return 0
    if request and follow:
        job = current_job(config.of_run(out, settings).job.cluster)
        return evaluation.follow(out, settings, request, jobs.States(PATIENCE), job)
    if request:
        scores = evaluation.on_tasks(out, settings, request, ema)
        if as_json:
            print(json.dumps(scores.values()))
        else:
            say("\n".join(scores.lines()))
        return 0
    if documents:
        figures = evaluation.on_documents(out, settings, text, data, tokens, format, ema)
    else:
        figures = evaluation.on_part(out, settings, part, samples, ema)
    if as_json:
        print(json.dumps(finite(figures)))
    else:
        shown = (f"{value:.4f}" if isinstance(value, float) else str(value) for value in figures.values())
        say("  ".join(f"{name} {value}" for name, value in zip(figures, shown, strict=True)))
    return 0


def parser() -> Parser:
    """The parser of ``hpclm evaluate``."""
    options = Parser(
        prog="hpclm evaluate",
        description="Measure a run's newest checkpoint: on its held-out data, on any text or dataset, or on tasks of "
        "lm-evaluation-harness.",
    )
    add = options.add_argument
    options.add_run(type=str)  # main expands it; --submit needs the word as it was typed
    options.add_settings("settings that differ from the run's own", default=[])
    what = options.add_mutually_exclusive_group()
    parts = "valid, test, train, or valid/NAME of data.validation (default: valid)"
    what.add_argument("--part", default="valid", metavar="PART", help=parts)
    text = 'a text, or .jsonl with {"text": ...} on each line; - reads standard input'
    what.add_argument("--text", type=paths.option, metavar="FILE", help=text)
    add("--format", choices=["text", "jsonl"], help="with --text: format of FILE; default: by its name and content")
    what.add_argument(
        "--data",
        type=paths.option,
        metavar="PREFIX",
        help="all sequences of a dataset made by hpclm preprocess; with a loss mask, the tokens that count in training",
    )
    tasks = "tasks of lm-evaluation-harness (pip install 'hpclm[lm-eval]')"
    what.add_argument("--tasks", metavar="A,B", help=tasks)
    add("--tasks-path", type=paths.option, metavar="DIR", help="with --tasks: a folder with your task files")
    add("--shots", type=whole(0), help="with --tasks: examples before each question (default: the task's)")
    add("--batch", type=whole(1), help="with --tasks: texts per batch (default: 16)")
    follow = (
        "with --tasks: score each checkpoint once, as the run publishes it, until the run has ended; scores go to its "
        "scores.jsonl, metrics.jsonl and sinks"
    )
    add("--follow", action="store_true", help=follow)
    submit = "with --follow: as a Slurm job of one process, with the run's own job settings; key=value changes them"
    add("--submit", action="store_true", help=submit)
    add("--tokens", type=whole(1), help="with --text and --data: stop after about this many tokens")
    samples = "read this many samples (default: one pass over the part), or with --tasks documents of each task (default: all)"
    add("--samples", type=whole(1), help=samples)
    options.add_ema("measure")
    options.add_json("print one JSON object")
    options.add_typed()
    return options


def _tasks(
    tasks: str, tasks_path: str | None, samples: int | None, shots: int | None, batch: int | None
) -> TaskRequest:
    names = tasks.split(",")
    if not all(names):
        raise UsageError("--tasks must be names, separated by commas")
    return TaskRequest(names, tasks_path, samples, shots, batch or 16)
