"""``hpclm generate``: continue prompts with a run's model."""

import json
import sys
from pathlib import Path
from typing import Literal

from hpclm.base import paths
from hpclm.base.errors import UsageError
from hpclm.base.terminal import say
from hpclm.inference import texts
from hpclm.inference.generation_settings import Limits, Sampling
from hpclm.parser import Parser, whole
from hpclm.rundir import runs


def main(
    run: Path,
    runs_folder: Path,
    settings: list[str],
    prompt: str | None,
    prompts: str | None,
    format: Literal["lines", "jsonl"] | None,
    interactive: bool,
    batch: int,
    tokens: int,
    stop: list[str],
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    as_json: bool,
) -> int:
    """Print continuations of the prompts, or continue texts interactively."""
    if prompts and (prompt is not None or interactive):
        raise UsageError("--prompts goes with neither --prompt nor --interactive")
    if prompt is None and not prompts and not interactive:
        raise UsageError("give --prompt TEXT, --prompts FILE or --interactive")
    if format and not prompts:
        raise UsageError("--format is for --prompts")
    limits = Limits(tokens, tuple(stop))
    sampling = Sampling(temperature, top_k or None, top_p, seed)
    given = [] if prompt is None and not prompts else list(texts.prompts(prompt, prompts, format))
    run = runs.located(run, runs_folder)
    from hpclm.inference import run_settings  # imports NumPy

    run_settings.checked_settings(run, settings, reads_text=True)

    from hpclm.inference.completion import Completer

    completer = Completer.of_run(run, settings)
    if interactive:
        from hpclm.inference.conversation import converse

        converse(completer, "".join(given), limits, sampling)
        return 0
    for done in completer.complete_all(given, batch, limits, sampling):
        if as_json or prompts:
            print(json.dumps(vars(done)), flush=True)
            continue
        text = done.prompt + done.text
        if sys.stdout.isatty():
            say(text)  # the text may contain control characters
        else:
            print(text)
    return 0


def parser() -> Parser:
    """The parser of ``hpclm generate``."""
    options = Parser(prog="hpclm generate", description="Continue prompts with a run's newest checkpoint.")
    add = options.add_argument
    options.add_run(type=paths.option_path)
    options.add_settings("settings that differ from the run's own", default=[])
    add("--prompt", metavar="TEXT", help="text to continue; - reads standard input")
    prompts = 'one prompt per line (.jsonl: {"prompt": TEXT}); - reads standard input; prints a JSON object for each'
    add("--prompts", type=paths.option, metavar="FILE", help=prompts)
    add("--format", choices=["lines", "jsonl"], help="with --prompts: format of FILE; default: by its name and content")
    interactive = "read lines from the terminal, and continue the text after each; an empty line continues further, /help lists commands"
    add("--interactive", action="store_true", help=interactive)
    add("--batch", type=whole(1), default=16, help="prompts per batch (default: 16)")
    add("--tokens", type=int, default=100, help="maximum number of new tokens (default: 100)")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated")
    add("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    top_k = "sample from this many most likely tokens; 0: all (default: 50)"
    add("--top-k", "--top", type=whole(0), default=50, help=top_k)
    top_p = "sample from the most likely tokens up to this probability (default: 1)"
    add("--top-p", type=float, default=1.0, help=top_p)
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    options.add_json("print a JSON object: prompt, text, tokens, finish")
    return options
