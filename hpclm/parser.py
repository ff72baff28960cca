"""The parser of every command's arguments, and the arguments that several commands have."""

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hpclm.base import paths, shipped
from hpclm.base.errors import ArgumentError, ExitCode, UsageError
from hpclm.base.registry import hint
from hpclm.base.terminal import line, say
from hpclm.node import secrets

if TYPE_CHECKING:
    from hpclm.config import hints

Result = TypeVar("Result")
ONE = "run directory, or its name below --runs"
SEVERAL = "run directories, their names below --runs, or patterns of these: 'sweep-*'"
NUMBER = re.compile(r"[\d.e+-]+")
"""Numbers, which are never secrets."""
USAGE = 4  # maximum number of lines of a usage that an error shows
STOP_OR_CANCEL = "stop asks the run itself, from any machine that sees its folder; cancel ends its job, also one that waits or hangs."
"""The difference between ``hpclm request RUN stop`` and ``hpclm cancel RUN``."""
DATA = """data:  data=TEXT         train on a text: a file or folder that hpclm preprocess reads, or a pattern. It is tokenized
                         once, into a folder datasets beside the run
       data=PREFIX       train on a dataset, PREFIX.bin and PREFIX.idx
       tokenizer=NAME    of a text: bytes (the default), a tokenizer.json, a sentencepiece .model, or package.module:Name"""


def exit_codes(meanings: Mapping[ExitCode, str]) -> str:
    """A line for --help with the exit codes of a command. ``meanings``: codes that mean something else in this command."""
    shown = {ExitCode.DONE: ExitCode.DONE.meaning, ExitCode.USAGE: ExitCode.USAGE.meaning, **meanings}
    return "exit codes: " + " · ".join(f"{code} {meaning}" for code, meaning in sorted(shown.items()))


EPILOG = textwrap.fill(
    exit_codes({code: code.meaning for code in ExitCode if code is not ExitCode.INTERRUPTED})
    + " · 128+n ended by signal n",
    width=110,
    subsequent_indent=" " * 12,  # below the first code
)


class Parser(argparse.ArgumentParser):
    """argparse's parser with messages of one line, safe for a terminal. For an unknown option, they suggest the intended one."""

    given: Sequence[str] = ()
    """The arguments of the last call of ``values``."""
    others: Callable[[], Mapping[str, Collection[str]]] = staticmethod(dict)
    """The options of all commands, which cli sets."""

    def __init__(self, intermixed: bool = True, **options: Any) -> None:
        """``intermixed``: whether options may separate the words of one argument. False for subcommands and REMAINDER arguments."""
        self._intermixed = intermixed
        if "\n" in f"{options.get('description')}{options.get('epilog')}":  # laid out by hand
            options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(**options)

    def call(self, function: Callable[..., Result], argv: Sequence[str]) -> Result:
        """Call ``function`` with the values of the arguments by name; exit with 2 for invalid arguments."""
        values = self.values(argv)
        try:
            return function(**values)
        except UsageError as error:
            self._refuse(str(error))
        except ArgumentError as error:
            if not {name for name, *_ in error.wrong} <= values.keys():
                raise
            self._refuse("; ".join(f"--{name.replace('_', '-')} {value!r} {rule}" for name, value, rule in error.wrong))

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values of the arguments by name; exit with 2 for invalid arguments."""
        self.given = argv
        parse = self.parse_known_intermixed_args if self._intermixed else self.parse_known_args
        values, unknown = parse(argv)
        if unknown:
            self._refuse(self._unrecognized(unknown))
        if "typed" in values:
            values.typed = list(argv)
        return vars(values)

    def add_settings(self, help: str, files: bool = False, **options: Any) -> None:
        """The argument for key=value words; ``files``: whether settings files are allowed too."""
        metavar = "FILE | key=value" if files else "key=value"
        settings = self.add_argument("settings", **{"nargs": "*", "metavar": metavar} | options, help=help)
        completed(settings, "presets" if files else "settings")
        if files:
            self.add_typed()

    def add_typed(self) -> None:
        """The value ``typed``, which holds all arguments, for messages and other processes."""
        self.set_defaults(typed=[])

    def add_run(self, help: str = ONE, **options: Any) -> None:
        """The argument for one or more runs, and the option --runs."""
        completed(self.add_argument("run", **{"type": paths.option} | options, help=help), "runs")
        self.add_runs_folder()

    def add_runs_folder(self) -> None:
        """Add the option --runs."""
        text = "where runs are (default: runs)"
        folder: dict[str, Any] = dict(dest="runs_folder", type=paths.option_path, default=Path("runs"))
        self.add_argument("--runs", metavar="FOLDER", help=text, **folder)

    def add_gpus_kind(self, help: str) -> None:
        """Add the option --gpus-kind."""
        self.add_argument("--gpus-kind", default="H100", metavar="KIND", help=help)

    def add_json(self, help: str) -> None:
        """Add the option --json."""
        self.add_argument("--json", dest="as_json", action="store_true", help=help)

    def add_ema(self, verb: str) -> None:
        """Add the option --ema. ``verb``: what the command does with the weights."""
        self.add_argument("--ema", action="store_true", help=f"{verb} the average of the weights (optim.ema)")

    def add_sweep(self, starts: str = "start") -> None:
        """The options --sweep and --parallel."""
        several = self.add_argument_group("several runs")
        values = f"{starts} a separate run for each value; for each combination if repeated"
        several.add_argument("--sweep", "--array", action="append", default=[], metavar="key=a,b,c", help=values)
        at_once = "with --sweep: how many runs train at a time on this machine, each on separate GPUs (default: 1)"
        several.add_argument("--parallel", type=whole(1), metavar="N", help=at_once)

    def add_from(self, more: str = "") -> None:
        """Add the option --from."""
        back = f"continue from the checkpoint of this step; newer ones are set aside, not deleted{more}"
        self.add_argument("--from", dest="resume_step", type=whole(0), metavar="STEP", help=back)

    def add_wait(self, help: str) -> None:
        """Add the option --wait."""
        from_0 = number(lambda value: 0 <= value < math.inf, "a number of seconds from 0")
        self.add_argument("--wait", type=from_0, default=300, metavar="SECONDS", help=f"{help} (default: 300)")

    def error(self, message: str) -> NoReturn:
        """Exit with 2. Unknown options are reported before missing arguments, which argparse reports first."""
        unknown = self._unknown_options()
        if unknown and message.startswith("the following arguments are required"):
            message = self._unrecognized(unknown)
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            near = hint(choice[1], re.findall(r"[^\s',]+", choice[2]))
            message += f".{near}" if near else ""
        self._refuse(message)

    def _refuse(self, message: str) -> NoReturn:
        """Exit with 2 after the message. A long usage is left out, because it would hide the message."""
        usage = self.format_usage()
        if usage.count("\n") > USAGE:
            usage = f"usage: {self.prog} --help shows all options\n"
        say(f"{usage}{self.prog}: error: {line(message)}", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE)

    def options(self) -> list[str]:
        """The options that the help shows."""
        return re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", self.format_help())

    def _unknown_options(self) -> list[str]:
        known = {*self.options(), "--"}
        return [word for word in self.given if word.startswith("--") and word.partition("=")[0] not in known]

    def _unrecognized(self, unknown: Sequence[str]) -> str:
        """The message for unknown arguments: their names, and suggestions. It never shows values that may be secrets."""
        from hpclm.config import elsewhere, hints

        words = [word for word in unknown if word.startswith("-")] or unknown
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

        option = word.partition("=")[0]
        values = self._values(word)
        secret = secrets.is_secret(option.lstrip("-")) and not all(map(NUMBER.fullmatch, values))
        others = {command: options for command, options in self.others().items() if command != self._command}
        offered = re.findall(r"(?<![\w-])--[\w-]+", self.format_usage())
        return hints.Unknown(self._command, option, [] if secret else values, secret, offered, others)

    def _values(self, word: str) -> list[str]:
        """The values of the option ``word``: the text after =, or the words up to the next option, setting or settings file."""
        from hpclm.config.settings import is_override

        _, sign, value = word.partition("=")
        if sign:
            return list(filter(None, [value]))
        values: list[str] = []
        for other in self.given[list(self.given).index(word) + 1 :]:
            if other.startswith("--") or is_override(other):
                break
            if values and (other in shipped.presets() or other.endswith(".yaml")):
                break
            values.append(other)
        return values


def completed(argument: argparse.Action, words: str) -> None:
    """Set the completion of an argument. ``words``: runs, requests, settings, presets or topics, which completion.py defines."""
    argument.complete = {shell: f"_hpclm_{words}" for shell in ("bash", "zsh")}  # type: ignore[attr-defined]


def setting(key: str) -> dict[str, Any]:
    """Parameters of add_argument for an option that sets ``key``. All such options append key=value words to the value `job`."""
    return dict(dest="job", action="append", default=[], type=f"{key}={{}}".format)


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number of at least ``least``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 15 or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def number(allowed: Callable[[float], bool], description: str) -> Callable[[str], float]:
    """The type of an argument that is a number and for which ``allowed`` holds. ``description``: the condition in words."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
        return value

    return parse
