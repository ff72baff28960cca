"""The verb ``hpclm evaluate``: how well a run's model predicts held-out data, a text or a dataset, or does at tasks."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm import cli
from hpclm.rundir.rows import finite
from hpclm.terminal import say

if TYPE_CHECKING:
    from hpclm.config import DataConfig
    from hpclm.inference.harness import Scored


def main(argv: list[str]) -> int:
    """``hpclm evaluate``."""
    parser = cli.Parser(
        prog="hpclm evaluate",
        description="Measure a run's newest checkpoint: on its held-out data, on any text or dataset, or on tasks of "
        "lm-evaluation-harness.",
    )
    parser.add_argument("run", type=Path, help=cli.ONE)
    cli.add_runs(parser)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that differ from the run's own")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--part",
        default="valid",
        metavar="PART",
        help="valid, test, train, or valid/NAME of data.validation (default: valid)",
    )
    what.add_argument(
        "--text", metavar="FILE", help='a text, or a .jsonl file with a {"text": ...} a line; - reads standard input'
    )
    what.add_argument("--data", metavar="PREFIX", help="all sequences of a dataset made by hpclm preprocess")
    what.add_argument(
        "--tasks", metavar="A,B", help="tasks of lm-evaluation-harness, which pip install 'hpclm[lm-eval]' brings"
    )
    parser.add_argument("--tasks-path", metavar="DIR", help="with --tasks: a folder of task files of your own")
    parser.add_argument(
        "--shots", type=int, help="with --tasks: examples before each question (default: what the task says)"
    )
    parser.add_argument("--batch", type=int, help="with --tasks: texts that are read together (default: 16)")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="with --tasks: score each checkpoint once, as the run publishes it, until the run has ended; scores go to "
        "its scores.jsonl, metrics.jsonl and sinks",
    )
    parser.add_argument(
        "--submit",
        action="store_true",
        help="with --follow: as a Slurm job of one process, with the run's own job settings; key=value changes them",
    )
    parser.add_argument("--tokens", type=int, help="with --text and --data: stop after about this many tokens")
    parser.add_argument(
        "--samples",
        type=int,
        help="read this many samples (default: one pass over the part), or with --tasks documents of each task (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_intermixed_args(argv)  # settings may follow options
    given_run, args.run = args.run, cli.located(args.run, args.runs)
    if args.samples is not None and args.samples < 1:
        parser.error("--samples must be at least 1")
    if args.tokens is not None and args.tokens < 1:
        parser.error("--tokens must be at least 1")
    given = args.text or args.data
    if given and args.samples is not None:
        parser.error("--samples is for --part and --tasks; use --tokens")
    if args.tasks is None and not (args.tasks_path is args.shots is args.batch is None):
        parser.error("--tasks-path, --shots and --batch are for --tasks")
    if args.submit and not args.follow:
        parser.error("--submit is for --follow")
    if args.follow and (args.tasks is None or args.json):
        parser.error("--follow is for --tasks, without --json")
    if (args.shots is not None and args.shots < 0) or (args.batch is not None and args.batch < 1):
        parser.error("--shots must be at least 0, and --batch at least 1")
    if args.tasks is not None and not all(args.tasks.split(",")):
        parser.error("--tasks must be names, separated by commas")
    if not given and args.tokens is not None:
        parser.error("--tokens is for --text and --data; use --samples")
    if args.follow:
        from hpclm.commands import follow

        if args.submit:
            words = [word for word in argv if word not in ("--submit", str(given_run))]
            return follow.submit(args, [str(args.run.absolute()), *words])
        return follow.main(args)
    if args.tasks is not None:
        print_tasks(*at_tasks(args), args.json)
        return 0
    if given:
        result = scored(args.run, args.settings, args.text, args.data, args.tokens)
    else:
        result = measure(args.run, args.settings, args.part, args.samples)
    if not math.isfinite(float(result["loss"])):
        from hpclm.errors import ConfigError
        from hpclm.inference.sampling import NOT_FINITE

        raise ConfigError(f"the loss is {result['loss']}: {NOT_FINITE}")
    if args.json:
        print(json.dumps(finite(result)))
    else:
        say(
            "  ".join(
                f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
            )
        )
    return 0


def at_tasks(args: argparse.Namespace) -> tuple["Scored", int]:
    """The scores of the newest checkpoint at the tasks of the command line, and its step."""
    from hpclm.data import tokenizers
    from hpclm.inference import run_model
    from hpclm.inference.harness import Tasks, Wanted
    from hpclm.interop.huggingface import special, tokenizer

    config = run_model.settings(args.run, args.settings)
    words = tokenizers.of_run(config.data)
    tasks = Tasks(Wanted(args.tasks.split(","), args.tasks_path, args.samples, args.shots))
    device, dtype = run_model.place(config)
    model, progress = run_model.load_model(args.run, config, words.fingerprint, device, dtype)
    begin = special.begin(args.run, tokenizer.paths(config.data), words.eod)
    return tasks.score(model.to(dtype), words, begin, args.batch or 16), progress.step


def print_tasks(found: "Scored", step: int, as_json: bool) -> None:
    """A line for each metric, or one JSON object."""
    if as_json:
        rows = {task: finite(row) for task, row in found.scores.items()}
        print(json.dumps({"tasks": rows, "samples": found.samples, "step": step}))
        return
    for task, row in found.scores.items():
        for metric, value in row.items():
            error = row.get(stderr_of(metric))
            if "_stderr" not in metric:
                say(f"{task}  {metric} {value:.4f}{'' if error is None else f' ± {error:.4f}'}  step {step}")


def stderr_of(metric: str) -> str:
    """The name of a metric's standard error; a filter's name stays at the end."""
    name, comma, rest = metric.partition(",")
    return f"{name}_stderr{comma}{rest}"


def measure(run: Path, overrides: list[str], part: str, wanted: int | None) -> dict[str, float | int | str]:
    """Mean loss per token in nats, perplexity, and what they were measured on."""
    from tqdm import tqdm

    from hpclm.data import sources
    from hpclm.data.batches import Batch, Batches
    from hpclm.engine.step import mean_loss
    from hpclm.inference import run_model
    from hpclm.inference.scoring import perplexity
    from hpclm.parallel.mesh import SINGLE

    config = run_model.settings(run, overrides)
    device, dtype = run_model.place(config)
    source = sources.build(config.data, config.model, config.seed)
    model, progress = run_model.load_model(run, config, source.fingerprint.get("tokenizer"), device, dtype)
    samples = source.samples(part, wanted)
    count = len(samples) if wanted is None else wanted
    batches = Batches(samples, config.data, config.model, config.plan(), source.eod, device)
    with tqdm(total=count, unit="sample", disable=None) as bar:

        def counted(batch: Batch) -> Batch:
            bar.update(len(batch.tokens))
            return batch

        mean = mean_loss(model, map(counted, batches.take(0, count)), device, SINGLE)
    return {"loss": mean, "perplexity": perplexity(mean), "step": progress.step, "part": part, "samples": count}


def scored(
    run: Path, overrides: list[str], text: str | None, prefix: str | None, most: int | None
) -> dict[str, float | int | str]:
    """Loss, perplexity and bits per byte of ``text``, or of the dataset ``prefix``."""
    from tqdm import tqdm

    from hpclm.data import tokenizers
    from hpclm.errors import ConfigError
    from hpclm.inference import run_model, scoring

    config = run_model.settings(run, overrides)
    data = config.data if prefix is None else alone(config.data, prefix)
    tokenizer = None
    try:
        tokenizer = tokenizers.of_run(data)
    except ConfigError:
        if text is not None:
            raise
    if text is not None and tokenizer is not None:
        content = sys.stdin.read() if text == "-" else scoring.text_of(text)
        documents = scoring.of_text(text, content, tokenizer)
    else:
        documents = scoring.of_dataset(Path(prefix or ""), tokenizer)
    device, dtype = run_model.place(config)
    model, progress = run_model.load_model(run, config, tokenizer.fingerprint if tokenizer else None, device, dtype)
    eod = tokenizer.eod if tokenizer else None
    with tqdm(total=most, unit="token", unit_scale=True, disable=None) as bar:
        found = scoring.score(model, documents, eod, config.batch.micro_size, most, bar)
    return {**found.result(progress), "source": text or prefix or ""}


def alone(data: "DataConfig", prefix: str) -> "DataConfig":
    """``data`` of the dataset ``prefix`` and no other; a tokenizer that the settings name stays."""
    from dataclasses import replace

    return replace(data, source="indexed", prefix=prefix, blend=[], train=[], valid=[], test=[], validation=[])
