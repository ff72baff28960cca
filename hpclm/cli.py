"""The command ``hpclm VERB``: finds the verb, and calls it.

A verb is a module with ``main(argv)``, and ``parser()`` for its arguments. ``python -m hpclm VERB`` calls the same function.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from hpclm import __version__, failures
from hpclm.errors import ConfigError
from hpclm.node import bus_error, interruption
from hpclm.parser import EPILOG, Parser
from hpclm.registry import hint
from hpclm.terminal import say

GROUPS = {
    "start": {
        "demo": ("hpclm.commands.demo", "train a small GPT on the source code of Python's standard library"),
        "train": ("hpclm.commands.train", "train a model, or continue a run"),
        "submit": ("hpclm.commands.submit", "train on Slurm, on the machines of a hostfile, or locally"),
        "resume": (
            "hpclm.commands.resume",
            "submit a run again, to continue from its last checkpoint, optionally with changes",
        ),
    },
    "watch": {
        "status": ("hpclm.commands.status", "show the status of runs: queue, step, loss, speed, time left"),
        "top": ("hpclm.commands.top", "show all runs live, with their loss curves"),
        "logs": ("hpclm.commands.logs", "print or follow the log of a run, a rank or a job"),
        "report": (
            "hpclm.commands.report",
            "write a page about one or more runs: curves, attempts, and why they ended",
        ),
        "checkpoints": ("hpclm.commands.checkpoints", "list and verify a run's checkpoints"),
    },
    "change": {
        "request": ("hpclm.commands.request", "ask a run that trains to save, or to save and stop"),
        "cancel": ("hpclm.commands.cancel", "end a run's job: it saves if it trains, and leaves the queue"),
        "sync": ("hpclm.commands.sync", "send a run's sinks, such as W&B, the metrics they lack"),
    },
    "data": {
        "train-tokenizer": ("hpclm.commands.train_tokenizer", "train a tokenizer on text"),
        "preprocess": ("hpclm.commands.preprocess", "convert text into a dataset"),
        "data": ("hpclm.commands.data", "inspect, verify, hash, merge and convert datasets"),
    },
    "models": {
        "generate": ("hpclm.commands.generate", "continue a prompt with a run's model"),
        "evaluate": ("hpclm.commands.evaluate", "measure the loss of a run's model on held-out data"),
        "convert": (
            "hpclm.commands.convert",
            "convert weights to Hugging Face or GGUF, and from Hugging Face or Megatron",
        ),
    },
    "help": {
        "docs": ("hpclm.commands.docs", "show a page of the documentation, what a setting is, or where words occur"),
        "config": ("hpclm.commands.config", "print and explain settings"),
        "planner": ("hpclm.commands.planner", "estimate memory and speed of a run, and suggest layouts"),
        "doctor": ("hpclm.commands.doctor", "show each process's environment, and diagnose problems"),
        "completion": ("hpclm.commands.completion", "print a script for completion in bash or zsh"),
    },
}
"""Verbs by what they are for: their modules, and what they do."""
VERBS = {verb: row for verbs in GROUPS.values() for verb, row in verbs.items()}
RENAMED = {"save-now": "save", "stop": "stop"}
"""Former verbs, and what ``hpclm request`` calls them."""

ELSEWHERE = {
    "env": "use hpclm doctor",
    "preflight": "every run begins with it; hpclm doctor checks a machine without a run",
    "import-deepspeed": "hpclm docs migrating names the settings of a DeepSpeed JSON's keys",
}
"""Words that are no verbs, and what does what they stand for."""


def main(argv: Sequence[str] | None = None) -> int:
    """``hpclm VERB ...``."""
    return failures.run(_dispatch, argv)


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        return _dispatch([*arguments[1:], "--help"])
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            f"usage: hpclm VERB ...\n\nTrain GPT models on HPC clusters.\n\n{_listed()}\n\nhpclm help VERB, or hpclm VERB --help, shows its options.\n\n{EPILOG}"
        )
        return 0
    verb, *rest = arguments
    if verb == "--version":
        print(f"hpclm {__version__}")
        return 0
    if verb in RENAMED:
        print(f"hpclm {verb} RUN is now hpclm request RUN {RENAMED[verb]}", file=sys.stderr)
        verb, rest = "request", [*rest, RENAMED[verb]]
    if verb in ELSEWHERE:
        print(f"error: there is no hpclm {verb}: {ELSEWHERE[verb]}", file=sys.stderr)
        return 2
    if verb not in VERBS:
        say(
            f"error: unknown verb {verb!r}; choose one of {', '.join(VERBS)}.{hint(verb, list(VERBS))}", file=sys.stderr
        )
        return 2
    with interruption.prompt_exit(), bus_error.explained(_end_with):
        return function(verb)(rest)


def _listed() -> str:
    """The verbs by group, a line for each."""
    lines = ((group if not number else "", verb, what)
             for group, verbs in GROUPS.items() for number, (verb, (_, what)) in enumerate(verbs.items()))  # fmt: skip
    return "\n".join(f"{group:<8}{verb:<17}{what}" for group, verb, what in lines)


def function(verb: str) -> Callable[[list[str]], int]:
    """The function of a verb, which takes its arguments and returns the exit code."""
    main: Callable[[list[str]], int] = import_module(VERBS[verb][0]).main
    return main


def parser(verb: str) -> Parser:
    """The parser of a verb's arguments."""
    verb_parser: Parser = import_module(VERBS[verb][0]).parser()
    return verb_parser


def _end_with(cause: str) -> NoReturn:
    """End this process where it cannot go on, because of invalid files."""
    interruption.remove_unfinished()
    say(f"error: {cause}", file=sys.stderr)
    os._exit(ConfigError.exit_code)


def entry() -> None:
    """The ``hpclm`` command. Of one that a signal has ended nothing is taken down, which takes PyTorch seconds; ``train`` is, for its
    libraries and their processes."""
    try:
        code: str | int | None = failures.run(_dispatch)
    except SystemExit as error:
        code = error.code
    if code in [128 + number for number in interruption.SIGNALS] and sys.argv[1:2] != ["train"]:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(int(code))
    raise SystemExit(code)
