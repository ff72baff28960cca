"""``hpclm generate``: continue prompts with a run's model."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpclm.base import extras, paths
from hpclm.base.errors import ConfigError, UsageError
from hpclm.base.terminal import say
from hpclm.inference import texts
from hpclm.inference.generation_settings import Limits, Sampling
from hpclm.parser import Parser, whole
from hpclm.rundir import runs

if TYPE_CHECKING:
    from hpclm.inference.completion import Completer


def main(
    run: Path,
    runs_folder: Path,
    settings: list[str],
    prompt: str | None,
    prompts: str | None,
    format: Literal["lines", "jsonl"] | None,
    interactive: bool,
    chat: bool,
    samples: int,
    batch: int,
    tokens: int,
    stop: list[str],
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    ema: bool,
    as_json: bool,
) -> int:
    """Print continuations of the prompts, or continue texts interactively."""
    if prompts and (prompt is not None or interactive):
        raise UsageError("--prompts goes with neither --prompt nor --interactive")
    if prompt is None and not prompts and not interactive and not chat:
        raise UsageError("give --prompt TEXT, --prompts FILE, --interactive or --chat")
    if chat and (prompt is not None or prompts or interactive):
        raise UsageError("--chat reads your turns from standard input; give no prompt and no --interactive")
    if samples > 1 and (interactive or chat):
        raise UsageError("--samples is for --prompt and --prompts")
    if format and not prompts:
        raise UsageError("--format is for --prompts")
    limits = Limits(tokens, tuple(stop))
    sampling = Sampling(temperature, top_k or None, top_p, seed)
    given = [] if prompt is None and not prompts else list(texts.prompts(prompt, prompts, format))
    run = runs.located(run, runs_folder)
    from hpclm.inference import run_settings  # imports NumPy

    run_settings.checked_settings(run, settings, reads_text=True)

    from hpclm.inference.completion import Completer

    completer = Completer.of_run(run, settings, ema=ema)
    if chat:
        _chat(run, completer, limits, sampling)
        return 0
    if interactive:
        from hpclm.inference.conversation import converse

        converse(completer, "".join(given), limits, sampling)
        return 0
    repeated = [text for text in given for _ in range(samples)]
    for done in completer.complete_all(repeated, batch, limits, sampling):
        if as_json or prompts:
            print(json.dumps(vars(done)), flush=True)
            continue
        text = done.prompt + done.text
        if sys.stdout.isatty():
            say(text)  # the text may contain control characters
        else:
            print(text)
    return 0


def _chat(run: Path, completer: "Completer", limits: Limits, sampling: Sampling) -> None:
    """Hold a conversation with the run's chat template; ConfigError without one."""
    from hpclm.inference.conversation import chat
    from hpclm.preprocess.chat import prompt_for

    folder = completer.text.folder
    template = folder.template
    if template is None:
        raise ConfigError(
            f"{run} has no chat template: its model was not tuned on conversations; use --interactive, which continues text"
        )
    problem = extras.missing("--chat", "transformers")
    if problem:
        raise ConfigError(problem)
    chat(completer, lambda messages: prompt_for(messages, template, folder.tokens), limits, sampling)


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
    add(
        "--chat",
        action="store_true",
        help="a conversation with the run's chat template: each line is your turn, until Ctrl-D",
    )
    add("--samples", type=whole(1), default=1, metavar="N", help="continuations of each prompt (default: 1)")
    add("--batch", type=whole(1), default=16, help="prompts per batch (default: 16)")
    add("--tokens", type=int, default=100, help="maximum number of new tokens (default: 100)")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated")
    add("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    top_k = "sample from this many most likely tokens; 0: all (default: 50)"
    add("--top-k", "--top", type=whole(0), default=50, help=top_k)
    top_p = "sample from the most likely tokens up to this probability (default: 1)"
    add("--top-p", type=float, default=1.0, help=top_p)
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    options.add_ema("use")
    options.add_json("print a JSON object: prompt, text, tokens, finish")
    return options
