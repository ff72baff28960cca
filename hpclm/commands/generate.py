"""The verb ``hpclm generate``: continue prompts with a run's model."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hpclm import paths, terminal
from hpclm.config.checks import is_utf8
from hpclm.errors import ConfigError
from hpclm.inference import texts
from hpclm.inference.generation_settings import Limits, Sampling
from hpclm.parser import Parser
from hpclm.registry import hint
from hpclm.rundir import runs
from hpclm.terminal import say

if TYPE_CHECKING:
    from hpclm.inference.completion import Completer

COMMANDS = {"/help": "show this", "/clear": "begin a new text", "/exit": "exit, as Ctrl-D does"}
"""What may be typed in place of text, alone on a line."""


def main(argv: list[str]) -> int:
    """``hpclm generate``."""
    args = _arguments(argv)
    limits = Limits(args.tokens, tuple(args.stop))
    sampling = Sampling(args.temperature, args.top_k or None, args.top_p, args.seed)
    prompts = [] if args.interactive and args.prompt is None else list(_prompts(args))
    run = runs.located(args.run, args.runs)
    from hpclm.inference import run_settings  # imports NumPy

    run_settings.check(run, args.settings, reads_text=True)

    from hpclm.inference.completion import Completer

    completer = Completer(run, args.settings)
    if args.interactive:
        converse(completer, "".join(prompts), limits, sampling)
        return 0
    for done in completer.complete_all(prompts, args.batch, limits, sampling):
        if args.json or args.prompts:
            print(json.dumps(vars(done)), flush=True)
        else:  # a model may have learned, or make up, what steers a terminal
            text = done.prompt + done.text
            say(text) if sys.stdout.isatty() else print(text)
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    options = parser()
    args = options.parse_intermixed_args(argv)  # settings may follow options
    if args.prompts and (args.prompt is not None or args.interactive):
        options.error("--prompts goes with neither --prompt nor --interactive")
    if args.prompt is None and not args.prompts and not args.interactive:
        options.error("give --prompt TEXT, --prompts FILE or --interactive")
    if args.format and not args.prompts:
        options.error("--format is for --prompts")
    if args.batch < 1 or args.top_k < 0:
        options.error("--batch must be at least 1, and --top-k at least 0")
    return args


def parser() -> Parser:
    """The parser of ``hpclm generate``."""
    options = Parser(prog="hpclm generate", description="Continue prompts with a run's newest checkpoint.")
    add = options.add_argument
    options.add_run(type=paths.option_path)
    options.add_runs_folder()
    other = "settings that differ from the run's own"
    options.add_settings(other, default=[])
    add("--prompt", metavar="TEXT", help="text to continue; - reads standard input")
    prompts = 'one prompt per line (.jsonl: {"prompt": TEXT}); - reads standard input; prints a JSON object for each'
    add("--prompts", type=paths.option, metavar="FILE", help=prompts)
    add(
        "--format",
        choices=["lines", "jsonl"],
        help="with --prompts: what FILE holds; default: by its name and content",
    )
    interactive = "read lines from the terminal, and continue the text after each; an empty line continues further, /help lists commands"
    add("--interactive", action="store_true", help=interactive)
    add("--batch", type=int, default=16, help="prompts per batch (default: 16)")
    add("--tokens", type=int, default=100, help="new tokens at most (default: 100)")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated")
    add("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    add("--top-k", "--top", type=int, default=50, help="sample from this many most likely tokens; 0: all (default: 50)")
    top_p = "sample from the most likely tokens up to this probability (default: 1)"
    add("--top-p", type=float, default=1.0, help=top_p)
    add("--seed", type=int, default=0, help="same seed, same text (default: 0)")
    add("--json", action="store_true", help="print a JSON object: prompt, text, tokens, finish")
    return options


def _prompts(args: argparse.Namespace) -> Iterator[str]:
    """The prompts of the command line, or of the file it names."""
    path = args.prompts
    if path is None:
        prompt = texts.text_of("-", "--prompt") if args.prompt == "-" else args.prompt
        if not is_utf8(prompt):
            raise ConfigError("the prompt is not UTF-8 text")
        yield prompt
        return
    text = texts.text_of(path, "--prompts")
    if texts.is_json_lines(path, text, args.format, "lines"):
        yield from texts.json_texts(path, text, "prompt", "the text to continue")
    else:
        yield from texts.lines_of(text)


def converse(completer: "Completer", text: str, limits: Limits, sampling: Sampling) -> None:
    """Continue ``text``, then the text with each line that is typed after it, until the input ends."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        say("An empty line continues the text, /help lists commands, Ctrl-C stops, Ctrl-D exits.", file=sys.stderr)
    turn = 0
    if text:
        text += _streamed(completer, text, limits, sampling)
        turn = 1
    while True:
        if at_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        command = line.rstrip()
        if not line or command == "/exit":
            return
        if command == "/clear":
            text = ""
            continue
        if re.fullmatch(r"/\w+", command):
            say(_told(command), file=sys.stderr)
            continue
        text += line.rstrip("\n")
        text += _streamed(completer, text, limits, replace(sampling, first=turn))
        turn += 1


def _told(command: str) -> str:
    """The commands, or that ``command`` is none."""
    if command == "/help":
        return "\n".join(terminal.columns([*COMMANDS.items(), ("an empty line", "continue the text")]))
    return f"no command is called {command}; /help lists them. Put a space before it if it is text.{hint(command, [*COMMANDS])}"


def _streamed(completer: "Completer", text: str, limits: Limits, sampling: Sampling) -> str:
    """Print the continuation of ``text`` as it comes; what there is of it, also after Ctrl-C."""
    shown = ""
    # what may become a stop string, or the rest of a character, is not shown yet
    back = max((len(stop) for stop in limits.stop), default=1) - 1

    def show(_: int, so_far: str) -> None:
        nonlocal shown
        whole = so_far.rstrip("\ufffd")
        ready = whole[: len(whole) - back] if back else whole
        if len(ready) > len(shown):
            say(ready[len(shown) :], end="", flush=True)
            shown = ready

    try:
        done = completer.complete([text], limits, sampling, show)[0].text
        say(done[len(shown) :], flush=True)
        return done
    except KeyboardInterrupt:
        say()
        return shown
