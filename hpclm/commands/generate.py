"""``hpclm generate``: continue prompts with a run's model."""

import argparse
import json
import sys

from hpclm import paths
from hpclm.inference import texts
from hpclm.inference.generation_settings import Limits, Sampling
from hpclm.parser import Parser
from hpclm.rundir import runs
from hpclm.terminal import say


def main(argv: list[str]) -> int:
    """``hpclm generate``."""
    args, limits, sampling = _arguments(argv)
    prompts = (
        [] if args.interactive and args.prompt is None else list(texts.prompts(args.prompt, args.prompts, args.format))
    )
    run = runs.located(args.run, args.runs)
    from hpclm.inference import run_settings  # imports NumPy

    run_settings.check(run, args.settings, reads_text=True)

    from hpclm.inference.completion import Completer

    completer = Completer(run, args.settings)
    if args.interactive:
        from hpclm.inference.conversation import converse

        converse(completer, "".join(prompts), limits, sampling)
        return 0
    for done in completer.complete_all(prompts, args.batch, limits, sampling):
        if args.json or args.prompts:
            print(json.dumps(vars(done)), flush=True)
        else:  # a model may have learned, or make up, what steers a terminal
            text = done.prompt + done.text
            say(text) if sys.stdout.isatty() else print(text)
    return 0


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, Limits, Sampling]:
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
    with options.mistakes():
        limits = Limits(args.tokens, tuple(args.stop))
        sampling = Sampling(args.temperature, args.top_k or None, args.top_p, args.seed)
    return args, limits, sampling


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
