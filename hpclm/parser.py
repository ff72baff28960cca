"""The parser of the arguments of all verbs, and the arguments that several of them have."""

import argparse
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from hpclm import paths
from hpclm.errors import ConfigError, ExitCode
from hpclm.node import secrets
from hpclm.registry import hint
from hpclm.terminal import line, say

ONE = "run directory, or its name below --runs"
SEVERAL = "run directories, their names below --runs, or patterns of these: 'sweep-*'"
USAGE = 4  # lines of a usage that are shown with an error
STARTS_JOBS = ("hpclm submit", "hpclm resume", "hpclm train")
"""Verbs whose users may think of sbatch's options."""
DESCRIBES_RUN = (*STARTS_JOBS, "hpclm planner", "hpclm config", "hpclm demo")
"""Verbs whose users may think of other projects' options."""
STEP = ("--step", "--at-step", "--ckpt-step", "--checkpoint-step", "--load-step")
NEWEST = "the newest checkpoint is read; hpclm convert reads another one, by its folder: RUN/checkpoints/step-…"
OF_STEP = {
    "hpclm evaluate": NEWEST,
    "hpclm generate": NEWEST,
    "hpclm convert": "give the folder of the checkpoint instead of the run's: RUN/checkpoints/step-…",
}
"""What to do instead of naming the step of a checkpoint, by verb."""
OF_SUBMIT = (
    *(
        "--nodes",
        "--gpus",
        "--time",
        "--partition",
        "--account",
        "--qos",
        "--constraint",
        "--exclude",
        "--nodelist",
        "--mem",
    ),
    *(
        "--cpus-per-task",
        "--job-name",
        "--dependency",
        "--template",
        "--cluster",
        "--hostfile",
        "--sbatch",
        "--exclude-bad",
    ),
    *("--dry-run", "--interactive", "--debug", "--pdb", "--again", "--ranks"),
)
"""Options of ``hpclm submit`` that ``hpclm train`` does not have."""
STARTS_RUNS = ("hpclm submit", "hpclm train")
OF_PREPROCESS = ("--json-keys", "--json-key", "--columns", "--column", "--format", "--on-error", "--append-eod")
"""Options that its messages name, also where ``data=`` has called it."""
SETTINGS_FILE = ("--config", "--config-file", "--config_file", "--cfg", "--preset", "--settings", "--yaml")
"""Options by which other programs take a settings file."""
ALIASES = {
    **dict.fromkeys(STEP, ("--from",)),
    **dict.fromkeys(("--input", "--file"), ("--text", "--prompts")),
}
"""Options that have another name, the first of these that the verb has."""
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
    takes_settings = False
    """Whether the verb takes settings as key=value, so that an unknown option may be one."""

    def add_settings(self, help: str, complete: str = "settings", **options: Any) -> None:
        """Settings; ``complete``: what shells complete them with (``completed``)."""
        self.takes_settings = True
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

    def _unknown_options(self) -> list[str]:
        """Options that the verb does not have; argparse complains of missing arguments before them."""
        options = set(re.findall(r"(?<![\w-])--[\w-]+", self.format_help()))
        return [word for word in self.given if word.startswith("--") and word.partition("=")[0] not in {*options, "--"}]

    def _unrecognized(self, unknown: Sequence[str]) -> str:
        options = [word for word in self.given if word.startswith("-") and word in unknown] or unknown
        hints, settings, of_others = [], [], False
        for word in options:
            option, sign, value = word.partition("=")
            value = value if sign else self._after(word)
            meant = self._meant(option, value)
            of_others = of_others or (self.prog in DESCRIBES_RUN and _is_of_another_project(option))
            if self.prog in STARTS_RUNS and option in ("--data", "--tokenizer"):
                settings.append(f"{option[2:]}={shlex.quote(value) if value else '...'}")
            elif self.prog in STARTS_RUNS and option in OF_PREPROCESS:
                hints.append(f"{option} is an option of hpclm preprocess; data= takes the dataset that it writes")
            elif meant is not None:
                hints += [meant] if meant else []
            elif self.takes_settings and (setting := _setting(option, value or "...")):
                settings.append(setting)
            elif self.takes_settings and secrets.is_secret(option.lstrip("-")):
                hints.append(f"export {option.lstrip('-').replace('-', '_').upper()} where you start or submit the run")
        if settings:
            hints.append(f"settings are written without dashes, as key=value: {' '.join(settings)}")
        if of_others or (self.prog in STARTS_JOBS and not (hints or settings)):
            from hpclm.config.migrating import SEE

            hints.append(SEE)
        names = " ".join(word.partition("=")[0] for word in options)
        return "; ".join([f"unrecognized arguments: {names}", *hints])

    def _after(self, word: str) -> str:
        """The value that follows the option ``word``, or empty."""
        from hpclm.config import compose

        if word not in self.given:  # part of an argument with spaces
            return ""
        after = [*self.given[list(self.given).index(word) + 1 :], ""][0]
        return "" if after.startswith("-") or compose.is_override(after) else after

    def _meant(self, option: str, value: str) -> str | None:
        """What was meant by an unknown option: sbatch's, a misspelt one, or one of another project without a setting here. Empty if
        it was certainly no setting."""
        options = re.findall(r"(?<![\w-])--[\w-]+", self.format_usage())
        if same := [name for name in ALIASES.get(option, ()) if name in options]:
            return f"did you mean {' '.join([same[0], *([value] if value else [])])}?"
        if self.takes_settings:
            from hpclm.config.hints import is_reason, of_another_project, sbatch_option

            if option in STEP or (option == "--steps" and self.prog in OF_STEP):
                return f"{option}: {OF_STEP[self.prog]}" if self.prog in OF_STEP else ""
            if option in SETTINGS_FILE and self.prog in DESCRIBES_RUN:
                return f"the settings file is given by itself: {self.prog} {value or 'FILE'}"
            if option in OF_SUBMIT and self.prog == "hpclm train":
                return f"{option}: it is an option of hpclm submit; hpclm train starts no job"
            of_job = sbatch_option(option, value) if self.prog in STARTS_JOBS else None
            of_others = of_another_project(_as_name(option)) if self.prog in DESCRIBES_RUN else None
            reason = of_job or of_others or ""
            if is_reason(reason):
                return f"{option}: {reason}"
            if of_others and not of_others.startswith("job."):
                return None
        near = [name for name in options if option.endswith(name[1:])] or get_close_matches(
            option, options, n=1, cutoff=0.85
        )
        return f"did you mean {' '.join([near[0], *([value] if value else [])])}?" if near else None


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


def _as_name(option: str) -> str:
    """``--tensor-model-parallel-size`` as tables have it."""
    return option[2:].replace("-", "_").lower()


def _is_of_another_project(option: str) -> bool:
    from hpclm.config.hints import of_another_project

    return of_another_project(_as_name(option)) is not None


def _setting(option: str, value: str) -> str | None:
    """``--optim.lr``, or its name in another project, as key=value; without a value that may be a secret."""
    from hpclm.config import fields, hints

    name, keys = option[2:].replace("-", "_"), fields.keys()
    key = name if name in keys else hints.meant(name, keys)
    if key is None or hints.is_reason(key):
        return None
    if secrets.is_secret(name) and not re.fullmatch(r"[\d.e+-]+", value):
        value = "..."
    if "=" in key:
        return hints.with_value(key, name.lower(), value)
    if key == "engine.precision":
        value = hints.PRECISIONS.get(value.removeprefix("torch."), value)
    return f"{key}={fields.as_typed_list(key, value)}"
