"""``hpclm COMMAND``: call the command of that name.

A command is a module with ``parser()`` and ``main(...)``. ``main`` takes the values of the arguments as keywords.
"""

import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hpclm import __version__
from hpclm.base.errors import ExitCode
from hpclm.base.registry import hint
from hpclm.base.terminal import say
from hpclm.node import failures, interruption
from hpclm.parser import EPILOG, Parser

GROUPS = {
    "start": {
        "demo": "train a small GPT on the source code of Python's standard library",
        "train": "train a model, or continue a run",
        "submit": "train on Slurm, on the machines of a hostfile, or locally",
        "resume": "submit a run again, to continue from its last checkpoint, optionally with changes",
    },
    "watch": {
        "status": "show the status of runs: queue, step, loss, speed, time left",
        "top": "show all runs live, with their loss curves",
        "logs": "print or follow the log of a run, a rank or a job",
        "report": "write a page about one or more runs: curves, attempts, and why they ended",
        "checkpoints": "list and verify a run's checkpoints",
        "ledger": "show which documents each step of a run has read, and which steps read a document",
    },
    "change": {
        "request": "ask a run that trains to save, or to save and stop",
        "branch": "make a new run that goes on from a checkpoint of another one, with other settings",
        "cancel": "end a run's job: it saves if it trains, and leaves the queue",
        "sync": "send a run's sinks, such as W&B, the metrics they lack",
    },
    "data": {
        "train-tokenizer": "train a tokenizer on text",
        "preprocess": "convert text into a dataset",
        "data": "inspect, verify, hash, index, merge and convert datasets",
    },
    "models": {
        "generate": "continue a prompt with a run's model",
        "evaluate": "measure the loss of a run's model on held-out data",
        "average": "write the mean of several checkpoints as a new run",
        "convert": "convert weights to Hugging Face or GGUF, and from Hugging Face or Megatron",
    },
    "help": {
        "docs": "show a page of the documentation, explain a setting, or find words",
        "config": "print and explain settings",
        "planner": "estimate memory and speed of a run, and suggest layouts",
        "selftest": "test a block, optimizer or other code of yours in every layout",
        "doctor": "show each process's environment, and diagnose problems",
        "completion": "print a script for completion in bash or zsh",
    },
}
"""The commands by purpose, with a description of each; ``train-tokenizer`` is in commands/train_tokenizer.py."""
VERBS = {verb: text for group in GROUPS.values() for verb, text in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hpclm COMMAND ...``; returns the exit code."""
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
    if verb in ("--version", "-V"):
        print(f"hpclm {__version__}")
        return 0
    if verb not in VERBS:
        say(f"error: {_unknown(verb, rest)}", file=sys.stderr)
        return ExitCode.USAGE
    with interruption.raising():
        return function(verb)(rest)


def _unknown(word: str, rest: list[str]) -> str:
    """The message for an unknown command, with the intended one if it is clear."""
    from hpclm.base import shipped
    from hpclm.config import elsewhere
    from hpclm.rundir.runs import RUNS, is_run

    if meant := elsewhere.command_meant(word):
        return f"hpclm {word} does not exist: {meant}"
    if word.startswith("-"):
        after = next((other for other in rest if other in VERBS), "VERB")
        return f"the command comes first: hpclm {after} {word}"
    if word in shipped.presets() or word.endswith((".yaml", ".yml")) or re.match(r"[a-z]\w*(\.\w+)*=", word):
        return f"{word} is not a command; to train with it: hpclm train {word}"
    if any(map(is_run, (Path(word), RUNS / word))):
        return f"{word} is a run, not a command: hpclm status {word} shows it, hpclm train {word} continues it"
    return f"unknown command {word!r}; choose one of {', '.join(VERBS)}.{hint(word, list(VERBS))}"


def _listed() -> str:
    lines = []
    for group, verbs in GROUPS.items():
        heading = group
        for verb, text in verbs.items():
            lines.append(f"{heading:<8}{verb:<17}{text}")
            heading = ""
    return "\n".join(lines)


def function(verb: str) -> Callable[[list[str]], int]:
    """The function of a command, which takes its arguments and returns the exit code."""
    module = _module(verb)
    return partial(module.parser().call, module.main)


def parser(verb: str) -> Parser:
    """The parser of a command's arguments."""
    verb_parser: Parser = _module(verb).parser()
    return verb_parser


def _module(verb: str) -> Any:
    return import_module(f"hpclm.commands.{verb.replace('-', '_')}")


@cache
def options() -> dict[str, list[str]]:
    """The options of every command."""
    return {verb: parser(verb).options() for verb in VERBS}


Parser.others = staticmethod(options)
