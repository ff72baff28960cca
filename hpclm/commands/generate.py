"""The verb ``hpclm generate``: continue prompts with a run's model."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm import cli, files
from hpclm.errors import ConfigError
from hpclm.terminal import say

if TYPE_CHECKING:
    from hpclm.inference.completion import Completer, Completion, Limits
    from hpclm.inference.sampling import Sampling

LARGEST = 1 << 30  # bytes of a file of prompts


def main(argv: list[str]) -> int:
    """``hpclm generate``."""
    args = arguments(argv)
    from hpclm.inference.completion import Completer, Limits
    from hpclm.inference.sampling import Sampling

    limits = Limits(args.tokens, tuple(args.stop))
    sampling = Sampling(args.temperature, args.top_k or None, args.top_p, args.seed)
    prompts = [] if args.interactive and args.prompt is None else list(_prompts(args))
    completer = Completer(cli.located(args.run, args.runs), args.settings)
    if args.interactive:
        converse(completer, "".join(prompts), limits, sampling)
        return 0
    for done in completed(completer, prompts, args.batch, limits, sampling):
        if args.json or args.prompts:
            print(json.dumps(vars(done)), flush=True)
        else:  # a model may have learned, or make up, what steers a terminal
            text = done.prompt + done.text
            say(text) if sys.stdout.isatty() else print(text)
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = cli.Parser(prog="hpclm generate", description="Continue prompts with a run's newest checkpoint.")
    parser.add_argument("run", type=Path, help=cli.ONE)
    cli.add_runs(parser)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that differ from the run's own")
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads standard input")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt a line, in .jsonl files as {"prompt": TEXT}; - reads standard input; prints a JSON object for each',
    )
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="read lines from the terminal, and continue the text after each; an empty line continues further, /clear starts over",
    )
    parser.add_argument("--batch", type=int, default=16, help="prompts that are continued together (default: 16)")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens at most (default: 100)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    parser.add_argument(
        "--top-k", "--top", type=int, default=50, help="sample from this many most likely tokens; 0: all (default: 50)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most likely tokens up to this probability (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default: 0)")
    parser.add_argument("--json", action="store_true", help="print a JSON object: prompt, text, tokens, finish")
    args = parser.parse_intermixed_args(argv)  # settings may follow options
    if args.prompts and (args.prompt is not None or args.interactive):
        parser.error("--prompts goes with neither --prompt nor --interactive")
    if args.prompt is None and not args.prompts and not args.interactive:
        parser.error("give --prompt TEXT, --prompts FILE or --interactive")
    if args.batch < 1 or args.top_k < 0:
        parser.error("--batch must be at least 1, and --top-k at least 0")
    return args


def _prompts(args: argparse.Namespace) -> Iterator[str]:
    """The prompts of the command line, or of the file it names."""
    try:
        if args.prompts is None:
            prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
            prompt.encode()
            yield prompt
            return
        text = sys.stdin.read() if args.prompts == "-" else files.read_text(args.prompts, LARGEST)
    except UnicodeError:
        raise ConfigError("the prompt is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"--prompts {args.prompts}: {error.strerror}") from None
    lines = text.split("\n")  # nothing else ends a line of a prompt
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        yield _of_json(line, f"{args.prompts}, line {number}") if args.prompts.endswith(".jsonl") else line


def _of_json(line: str, where: str) -> str:
    try:
        row = json.loads(line)
        prompt = row["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise ConfigError(f'{where} must be a JSON object with the text to continue as "prompt"')
    return prompt


def completed(
    completer: "Completer", prompts: Sequence[str], size: int, limits: "Limits", sampling: "Sampling"
) -> Iterator["Completion"]:
    """The completions of all prompts, in their order, ``size`` at a time."""
    for begin in range(0, len(prompts), size):
        yield from completer.complete(prompts[begin : begin + size], limits, replace(sampling, first=begin))


def converse(completer: "Completer", text: str, limits: "Limits", sampling: "Sampling") -> None:
    """Continue ``text``, then the text with each line that is typed after it, until the input ends."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        say("An empty line continues the text, /clear begins a new one, Ctrl-C stops, Ctrl-D exits.", file=sys.stderr)
    waiting = not text
    turn = 0
    while True:
        if waiting:
            if at_terminal:
                print("> ", end="", flush=True)
            line = sys.stdin.readline()
            if not line:
                return
            if line.strip() == "/clear":
                text = ""
                continue
            text += line.rstrip("\n")
        waiting = True
        text += _streamed(completer, text, limits, replace(sampling, first=turn))
        turn += 1


def _streamed(completer: "Completer", text: str, limits: "Limits", sampling: "Sampling") -> str:
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
