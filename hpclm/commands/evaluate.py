"""``hpclm evaluate``: how well a run's model predicts held-out data, a text or a dataset, or does at tasks."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from hpclm import config, paths
from hpclm.inference import evaluation
from hpclm.inference.evaluation import TaskRequest
from hpclm.launch import jobs, submit
from hpclm.launch.schedulers import current_job
from hpclm.parser import Parser
from hpclm.rundir import runs
from hpclm.rundir.rows import finite
from hpclm.terminal import say

PATIENCE = 5.0  # seconds a scheduler may take


def main(argv: list[str]) -> int:
    """``hpclm evaluate``."""
    options = parser()
    args = options.parse_intermixed_args(argv)  # settings may follow options
    if problem := next(_misused(args), None):
        options.error(problem)
    typed_run, args.run = args.run, runs.located(Path(paths.expanded(args.run)), args.runs)
    if args.follow:
        if args.submit:
            words = [word for word in argv if word not in ("--submit", typed_run)]
            say(submit.submit_scoring(args.run, args.settings, _tasks(args), words))
            return 0
        job = current_job(config.of_run(args.run, args.settings).job.cluster)
        return evaluation.follow(args.run, args.settings, _tasks(args), jobs.States(PATIENCE), job)
    if args.tasks is not None:
        scores = evaluation.on_tasks(args.run, args.settings, _tasks(args))
        if args.json:
            print(json.dumps(scores.values()))
        else:
            say("\n".join(scores.lines()))
        return 0
    if args.text or args.data:
        figures = evaluation.on_documents(args.run, args.settings, args.text, args.data, args.tokens, args.format)
    else:
        figures = evaluation.on_part(args.run, args.settings, args.part, args.samples)
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
    for name, minimum in (("samples", 1), ("tokens", 1), ("shots", 0), ("batch", 1)):
        if (value := getattr(args, name)) is not None and value < minimum:
            yield f"--{name} must be at least {minimum}"
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


def _tasks(args: argparse.Namespace) -> TaskRequest:
    return TaskRequest(args.tasks.split(","), args.tasks_path, args.samples, args.shots, args.batch or 16)
