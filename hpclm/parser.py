"""The parser of the arguments of all verbs, and the arguments that several of them have."""

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hpclm import paths, shipped
from hpclm.errors import ConfigError, ExitCode
from hpclm.node import secrets
from hpclm.registry import hint
from hpclm.terminal import line, say

if TYPE_CHECKING:
    from hpclm.config import hints

ONE = "run directory, or its name below --runs"
SEVERAL = "run directories, their names below --runs, or patterns of these: 'sweep-*'"
NUMBER = re.compile(r"[\d.e+-]+")
"""Values that are not secrets."""
USAGE = 4  # lines of a usage that are shown with an error
STOP_OR_CANCEL = "stop asks the run itself, from any machine that sees its folder; cancel ends its job, also one that waits or hangs."
"""How ``hpclm request RUN stop`` and ``hpclm cancel RUN`` differ."""
DATA = """data:  data=TEXT         train on a text: a file or folder that hpclm preprocess reads, or a pattern. It is tokenized
                         once, into a folder datasets beside the run
       data=PREFIX       train on a dataset, PREFIX.bin and PREFIX.idx
       tokenizer=NAME    of a text: bytes (the default), a tokenizer.json, a sentencepiece .model, or package.module:Name"""


def exit_codes(meanings: Mapping[ExitCode, str]) -> str:
    """A line for --help with the exit codes of a verb; ``meanings``: those that mean something else than elsewhere."""
    shown = {ExitCode.DONE: ExitCode.DONE.meaning, ExitCode.USAGE: ExitCode.USAGE.meaning, **meanings}
    return "exit codes: " + " · ".join(f"{code} {meaning}" for code, meaning in sorted(shown.items()))


EPILOG = textwrap.fill(
    exit_codes({code: code.meaning for code in ExitCode if code is not ExitCode.INTERRUPTED})
    + " · 128+n ended by signal n",
    width=110,
    subsequent_indent=" " * len("exit codes: "),
)


class Parser(argparse.ArgumentParser):
    """argparse's; its messages, which quote arguments, are one safe line, and for an unknown option say what was meant."""

    given: Sequence[str] = ()
    """All arguments, for ``error``."""
    others: Callable[[], Mapping[str, Collection[str]]] = staticmethod(dict)
    """The options of all commands, which cli sets."""

    def add_settings(self, help: str, complete: str = "settings", **options: Any) -> None:
        """Settings; ``complete``: what shells complete them with (``completed``)."""
        completed(
            self.add_argument("settings", **{"nargs": "*", "metavar": "key=value"} | options, help=help), complete
        )

    def add_run(self, help: str = ONE, **options: Any) -> None:
        """A run, or several."""
        completed(self.add_argument("run", **{"type": paths.option} | options, help=help), "runs")

    def add_runs_folder(self) -> None:
        """The option --runs."""
        text = "where runs are (default: runs)"
        self.add_argument("--runs", type=paths.option_path, default=Path("runs"), metavar="FOLDER", help=text)

    def add_sweep(self, starts: str = "start") -> None:
        """The options --sweep and --parallel."""
        several = self.add_argument_group("several runs")
        values = f"{starts} a separate run for each value; for each combination if repeated"
        several.add_argument("--sweep", "--array", action="append", default=[], metavar="key=a,b,c", help=values)
        at_once = "with --sweep: so many runs train at a time on this machine, each on separate GPUs (default: 1)"
        several.add_argument("--parallel", type=positive, metavar="N", help=at_once)

    def add_wait(self, help: str) -> None:
        """The option --wait."""
        self.add_argument("--wait", type=seconds, default=300, metavar="SECONDS", help=f"{help} (default: 300)")

    @contextmanager
    def mistakes(self) -> Iterator[None]:
        """What the block refuses is a value that an option cannot have, so that the verb ends as for any wrong argument."""
        try:
            yield
        except ConfigError as error:
            self.error("; ".join(error.problems))

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As argparse; remembers all arguments, for ``error``."""
        self.given = self.given or list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """As argparse."""
        super().exit(status, message and line(message.rstrip("\n")) + "\n")

    def error(self, message: str) -> NoReturn:
        """As argparse, but without a usage so long that it would hide the message. Of unknown options only names are shown, since
        values may be secrets."""
        if message.startswith("unrecog"):
            message = self._unrecognized(message.partition(": ")[2].split())
        elif message.startswith("the following arguments are required") and (unknown := self._unknown_options()):
            message = self._unrecognized(unknown)
        elif choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            near = hint(choice[1], re.findall(r"[^\s',]+", choice[2]))
            message += f".{near}" if near else ""
        if self.format_usage().count("\n") <= USAGE:
            super().error(message)
        say(f"usage: {self.prog} --help shows all options", file=sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}")

    def options(self) -> list[str]:
        """The options that the help shows."""
        return re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", self.format_help())

    def _unknown_options(self) -> list[str]:
        """Options that the command does not have; argparse complains of missing arguments before them."""
        known = {*self.options(), "--"}
        return [word for word in self.given if word.startswith("--") and word.partition("=")[0] not in known]

    def _unrecognized(self, unknown: Sequence[str]) -> str:
        from hpclm.config import elsewhere, hints

        words = [word for word in self.given if word.startswith("-") and word in unknown] or unknown
        advice = [hints.about_option(self._unknown(word)) for word in words]
        texts = [one.text for one in advice if one.text]
        settings = [setting for one in advice for setting in one.settings]
        if settings:
            texts.append(f"settings are written without dashes, as key=value: {elsewhere.typed(settings)}")
        if any(one.foreign for one in advice) or (self._command in hints.DESCRIBE_RUNS and not texts):
            texts.append(elsewhere.SEE)
        names = " ".join(word.partition("=")[0] for word in words)
        return "; ".join([f"unrecognized arguments: {names}", *texts])

    @property
    def _command(self) -> str:
        return self.prog.removeprefix("hpclm ")

    def _unknown(self, word: str) -> "hints.Unknown":
        from hpclm.config import hints

        option, values = word.partition("=")[0], self._values(word)
        secret = secrets.is_secret(option.lstrip("-")) and not all(map(NUMBER.fullmatch, values))
        others = {command: options for command, options in self.others().items() if command != self._command}
        offered = re.findall(r"(?<![\w-])--[\w-]+", self.format_usage())
        return hints.Unknown(self._command, option, [] if secret else values, secret, offered, others)

    def _values(self, word: str) -> list[str]:
        """The values of the option ``word``: after its sign, or up to the next option, setting or settings file."""
        from hpclm.config import compose

        _, sign, value = word.partition("=")
        if sign or word not in self.given:  # the latter: part of an argument with spaces
            return [value] if value else []
        after = self.given[list(self.given).index(word) + 1 :]
        values: list[str] = []
        for other in after:
            if other.startswith("--") or compose.is_override(other):
                break
            if values and (other in shipped.presets() or other.endswith(".yaml")):
                break
            values.append(other)
        return values


def completed(argument: argparse.Action, words: str) -> None:
    """Have shells complete an argument with ``words``: runs, requests (and runs), settings, presets (and settings) or topics, as commands/completion.py
    defines them."""
    argument.complete = {shell: f"_hpclm_{words}" for shell in ("bash", "zsh")}  # type: ignore[attr-defined]


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdecimal() or len(text) > 15 or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def step(text: str) -> int:
    """Parse a step number."""
    if not text.isdecimal() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step number")
    return int(text)


def seconds(text: str) -> float:
    """Parse a number of seconds, from 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return number
