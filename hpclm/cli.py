"""The command ``hpclm VERB``, and the error handling of all verbs.

A verb is a module's ``main(argv)``, or the function after its colon; its arguments are those of ``parser()``, or ``FUNCTION_parser()``.
``python -m hpclm VERB`` runs the same function.
"""

import argparse
import errno
import io
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpclm import __version__, paths
from hpclm.errors import FULL, MACHINE, REFUSED, ConfigError, HpclmError
from hpclm.node import bus_error, environment, import_errors, interruption, secrets, threads
from hpclm.registry import hint
from hpclm.terminal import ArgumentParser, say

if TYPE_CHECKING:
    from hpclm.config import RunConfig

VERBS = {
    "demo": ("hpclm.commands.demo", "train a small GPT on the source code of Python's standard library"),
    "train": ("hpclm.commands.train", "train a model, or continue a run"),
    "submit": ("hpclm.commands.submit", "train on Slurm, on the machines of a hostfile, or locally"),
    "status": ("hpclm.commands.status", "show the status of runs: queue, step, loss, speed, time left"),
    "logs": ("hpclm.commands.logs", "print or follow the log of a run, a rank or a job"),
    "top": ("hpclm.commands.top", "show all runs live, with their loss curves"),
    "report": ("hpclm.commands.report", "write a page about one or more runs: curves, attempts, and why they ended"),
    "cancel": ("hpclm.commands.cancel", "save and stop a run, and remove its jobs from the queue"),
    "checkpoints": ("hpclm.commands.checkpoints", "list and verify a run's checkpoints"),
    "save-now": ("hpclm.commands.requests:save_now", "save a checkpoint now, and continue"),
    "stop": ("hpclm.commands.requests:stop", "save and stop a run"),
    "resume": ("hpclm.commands.resume", "continue a run from its last checkpoint, optionally with changes"),
    "sync": ("hpclm.commands.sync", "send a run's sinks, such as W&B, the metrics they lack"),
    "planner": ("hpclm.commands.planner", "estimate memory and speed of a run, and suggest layouts"),
    "config": ("hpclm.commands.config", "print and explain settings"),
    "preprocess": ("hpclm.commands.preprocess", "convert text into a dataset"),
    "data": ("hpclm.commands.data", "inspect, verify, hash, merge and convert datasets"),
    "evaluate": ("hpclm.commands.evaluate", "measure the loss of a run's model on held-out data"),
    "train-tokenizer": ("hpclm.datasets.train_tokenizer", "train a tokenizer on text"),
    "generate": ("hpclm.commands.generate", "continue a prompt with a run's model"),
    "convert": ("hpclm.commands.convert", "convert weights to Hugging Face or GGUF, and from Hugging Face or Megatron"),
    "docs": ("hpclm.commands.docs", "show a page of the documentation, or what a setting is"),
    "completion": ("hpclm.commands.completion", "print a script for completion in bash or zsh"),
    "doctor": ("hpclm.commands.doctor", "show each process's environment, and diagnose problems"),
}

ELSEWHERE = {
    "env": "use hpclm doctor",
    "preflight": "every run begins with it; hpclm doctor checks a machine without a run",
    "import-deepspeed": "hpclm docs migrating names the settings of a DeepSpeed JSON's keys",
}
"""Words that are no verbs, and what does what they stand for."""
ONE = "run directory, or its name below --runs"
SEVERAL = "run directories, their names below --runs, or patterns of these: 'sweep-*'"
STARTS_JOBS = ("hpclm submit", "hpclm resume", "hpclm train")
"""Verbs whose users may think of sbatch's options."""
STEP = ("--step", "--at-step", "--ckpt-step", "--checkpoint-step", "--load-step")
NEWEST = "the newest checkpoint is read; hpclm convert reads another one, by its folder: RUN/checkpoints/step-…"
OF_STEP = {
    "hpclm evaluate": NEWEST,
    "hpclm generate": NEWEST,
    "hpclm convert": "give the folder of the checkpoint instead of the run's: RUN/checkpoints/step-…",
}
"""What to do instead of naming the step of a checkpoint, by verb."""
ALIASES = {
    **dict.fromkeys(STEP, ("--from",)),
    **dict.fromkeys(("--input", "--file"), ("--text", "--prompts")),
}
"""Options that have another name, the first of these that the verb has."""
EPILOG = """exit codes: 0 done · 1 error in hpclm · 2 invalid arguments · 64 invalid settings or input files
            66 no good checkpoint · 75 run directory in use · 85 saved, restart · 93 do not restart
            128+n ended by signal n"""


def main(argv: Sequence[str] | None = None) -> int:
    """``hpclm VERB ...``."""
    return run(_dispatch, argv)


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        return _dispatch([*arguments[1:], "--help"])
    if not arguments or arguments[0] in ("-h", "--help"):
        verbs = "\n".join(f"  {verb:<18}{what}" for verb, (_, what) in VERBS.items())
        print(
            f"usage: hpclm VERB ...\n\nTrain GPT models on HPC clusters.\n\n{verbs}\n\nhpclm help VERB, or hpclm VERB --help, shows its options.\n\n{EPILOG}"
        )
        return 0
    verb, *rest = arguments
    if verb == "--version":
        print(f"hpclm {__version__}")
        return 0
    if verb in ELSEWHERE:
        print(f"error: there is no hpclm {verb}: {ELSEWHERE[verb]}", file=sys.stderr)
        return 2
    if verb not in VERBS:
        say(
            f"error: unknown verb {verb!r}; choose one of {', '.join(VERBS)}.{hint(verb, list(VERBS))}", file=sys.stderr
        )
        return 2
    module, _, function = VERBS[verb][0].partition(":")
    with interruption.prompt_exit(), bus_error.explained(_end_with):
        return getattr(import_module(module), function or "main")(rest) or 0


def _end_with(cause: str) -> NoReturn:
    """End this process where it cannot go on, because of invalid files."""
    interruption.remove_unfinished()
    say(f"error: {cause}", file=sys.stderr)
    os._exit(ConfigError.exit_code)


def run(verb: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Call a verb's main. Errors of the user or the machine become a message and an exit code, without a traceback."""
    _open_streams()
    threads.prepare()
    redact = secrets.Redactor()
    try:
        Path.cwd()  # it may have been deleted
    except OSError as error:
        say(f"error: the current folder cannot be read: {error.strerror}; change to another one (cd)", file=sys.stderr)
        return ConfigError.exit_code
    try:
        code = verb(list(sys.argv[1:] if argv is None else argv)) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except HpclmError as error:
        if not getattr(error, "told", False):
            _tell(error, redact)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MemoryError as error:
        print(f"error: not enough memory: {error if str(error) else _memory(error)}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return _no_more_processes()
        target = error.filename or _standard_output()
        if error.errno in MACHINE:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise closing it would fail too
            way_out = f"; {'free space on' if error.errno in FULL else 'check'} the disk, then start again"
        elif error.errno in REFUSED and error.filename is not None:
            way_out = "; check what it is, and its permissions"
        else:
            return _fault(error, redact)
        say(redact(f"error: {target}: {error.strerror}{way_out}"), file=sys.stderr)
        return 1 if error.errno in MACHINE else ConfigError.exit_code
    except Exception as error:
        return _no_more_processes() if "start new thread" in str(error) else _fault(error, redact)


def _standard_output() -> str:
    """What could not be written by a call that names no file: others name theirs (``files.naming``)."""
    try:
        target = os.readlink("/proc/self/fd/1")  # noqa: PTH115 - it may be a pipe
    except OSError:
        target = ""
    return f"standard output ({target})" if target.startswith("/") else "standard output"


def _memory(error: MemoryError) -> str:
    """What is known of memory that Python could not get: where, how much there was, and the limit."""
    frames = traceback.extract_tb(error.__traceback__)
    own = next((frame for frame in reversed(frames) if "hpclm" in Path(frame.filename).parts), frames[-1])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = (
        "" if soft == resource.RLIM_INFINITY else f"; the limit of this process is {soft / 2**20:,.0f} MiB (ulimit -v)"
    )
    return f"{own.name} in {Path(own.filename).name} could not get more; {used:,.0f} MiB are in use{limit}"


class PerRunErrors:
    """A context for each of several runs in a verb: with more than one run, an error does not stop the others."""

    def __init__(self, count: int):
        self.several, self.codes = count > 1, set[int]()

    @property
    def code(self) -> int:
        """The verb's exit code: that of the failed runs, or 1 if they differ."""
        return max(self.codes) if len(self.codes) < 2 and self.codes else min(len(self.codes), 1)

    def __enter__(self) -> None:
        """Begin a block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not self.several or not isinstance(error, HpclmError):
            return False
        self.codes.add(error.exit_code)
        sys.stdout.flush()
        _tell(error, secrets.Redactor())
        return True


def _tell(error: HpclmError, redact: secrets.Redactor) -> None:
    for line in str(error).splitlines():
        say(f"error: {redact(line)}", file=sys.stderr)


def _no_more_processes() -> int:
    print(
        "error: the system allows no more processes or threads for this user; raise the limit (ulimit -u), or end some, "
        "then start again",
        file=sys.stderr,
    )
    return 1


def _fault(error: Exception, redact: Callable[[str], str]) -> int:
    """Print what is wrong with the environment if that explains the current error, otherwise the traceback, without secrets; the
    exit code."""
    if reason := import_errors.explained(error):
        say(redact(f"error: {reason}"), file=sys.stderr)
        return import_errors.EXIT_CODE
    say(redact(traceback.format_exc() + import_errors.noted()), end="", file=sys.stderr)
    return 1


class Parser(ArgumentParser):
    """An argument parser for verbs that take key=value settings; for an unknown option it suggests what was meant."""

    given: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As argparse; remembers all arguments, for ``error``."""
        self.given = self.given or list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """As argparse; names unknown options only, without values, and says what was meant by each."""
        if not message.startswith("unrecog"):
            super().error(message)
        unknown = message.partition(": ")[2].split()
        options = [each for each in self.given if each.startswith("-") and each in unknown] or unknown
        hints, settings = [], []
        for word in options:
            option, sign, value = word.partition("=")
            value = value if sign else self._after(word)
            meant = self._meant(option, value)
            if meant is not None:
                hints += [meant] if meant else []
            elif setting := _setting(option, value or "..."):
                settings.append(setting)
            elif secrets.is_secret(option):
                hints.append(f"export {option.lstrip('-').replace('-', '_').upper()} where you start or submit the run")
        if settings:
            hints.append(f"settings are written without dashes, as key=value: {' '.join(settings)}")
        names = " ".join(word.partition("=")[0] for word in options)
        super().error("; ".join([f"unrecognized arguments: {names}", *hints]))

    def _after(self, word: str) -> str:
        """The value that follows the option ``word``, or empty."""
        from hpclm.config import compose

        after = [*self.given[list(self.given).index(word) + 1 :], ""][0]
        return "" if after.startswith("-") or compose.is_override(after) else after

    def _meant(self, option: str, value: str) -> str | None:
        """What was meant by an unknown option: sbatch's, a misspelt one, or one of another project without a setting here. Empty if
        it was certainly no setting."""
        from hpclm.config.hints import OTHER_NAMES, is_reason, sbatch_option

        known = re.findall(r"(?<![\w-])--[\w-]+", self.format_usage())
        if same := [name for name in ALIASES.get(option, ()) if name in known]:
            return f"did you mean {' '.join([same[0], *([value] if value else [])])}?"
        if option in STEP or (option == "--steps" and self.prog in OF_STEP):
            return f"{option}: {OF_STEP[self.prog]}" if self.prog in OF_STEP else ""
        of_job = sbatch_option(option, value) if self.prog in STARTS_JOBS else None
        reason = of_job or OTHER_NAMES.get(option[2:].replace("-", "_"), "")
        if is_reason(reason):
            return f"{option}: {reason}"
        near = [name for name in known if option.endswith(name[1:])] or get_close_matches(
            option, known, n=1, cutoff=0.85
        )
        return f"did you mean {' '.join([near[0], *([value] if value else [])])}?" if near else None


def _setting(option: str, value: str) -> str | None:
    """``--optim.lr``, or its name in another project, as key=value; without a value that may be a secret."""
    from hpclm.config import fields, hints

    name, known = option[2:].replace("-", "_"), fields.keys()
    key = name if name in known else hints.meant(name, known)
    if key and hints.is_reason(key):
        return None
    if secrets.is_secret(name) and not re.fullmatch(r"[\d.e+-]+", value):
        value = "..."
    return key and (key if "=" in key else f"{key}={value}")


def settings(words: Sequence[str], typed: Sequence[str] = ()) -> "RunConfig":
    """The settings of ``[FILE] key=value ...`` on top of the site file; ``typed``: all arguments of the verb, for messages."""
    from hpclm import config

    return config.from_cli(list(words), environment.site_file(), typed)


def run_parser(
    verb: str, description: str, epilog: str | None = None, run: str = ONE, nargs: str | None = None, wait: str = ""
) -> argparse.ArgumentParser:
    """RUN, --runs and, if ``wait`` describes it, --wait."""
    made = ArgumentParser(prog=f"hpclm {verb}", description=description, epilog=epilog)
    completed(made.add_argument("run", nargs=nargs, type=paths.option, help=run), "runs")
    if wait:
        made.add_argument("--wait", type=float, default=300, metavar="SECONDS", help=f"{wait} (default: 300)")
    add_runs(made)
    return made


def add_runs(made: argparse.ArgumentParser) -> None:
    """The option --runs."""
    made.add_argument(
        "--runs", type=paths.option_path, default=Path("runs"), metavar="FOLDER", help="where runs are (default: runs)"
    )


def completed(argument: argparse.Action, words: str) -> None:
    """Have shells complete an argument with ``words``: runs, settings, presets (and settings) or topics, as commands/completion.py
    defines them."""
    argument.complete = {shell: f"_hpclm_{words}" for shell in ("bash", "zsh")}  # type: ignore[attr-defined]


def located(run: Path, runs: Path) -> Path:
    """``run``, or if there is no such folder the one of that name below ``runs``, for verbs that read a run's model; ConfigError if
    there is neither."""
    from hpclm.rundir.runs import resolve

    if run.exists():
        return run
    for folder in (run.parent, runs / run.parent):
        if folder.name == "checkpoints" and folder.is_dir():
            steps = sorted(path.name for path in folder.glob("step-*"))
            has = f"has {', '.join(steps[-20:])}" if steps else "has no checkpoints"
            raise ConfigError(f"{run} does not exist; {folder} {has}")
    return runs / run if (runs / run).is_dir() else resolve(str(run), runs)


def step(text: str) -> int:
    """Parse a step number."""
    if not text.isdecimal() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step number")
    return int(text)


def _open_streams() -> None:
    """Replace closed standard streams by /dev/null."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            while (opened := os.open(os.devnull, os.O_RDWR)) < number:  # the lowest that is free: 0, 1 or 2
                continue
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "r" if number == 0 else "w", closefd=False))
        elif number and isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")  # for characters outside the locale's encoding


def entry() -> None:
    """The ``hpclm`` command. Of one that a signal has ended nothing is taken down, which takes PyTorch seconds; ``train`` is, for its
    libraries and their processes."""
    try:
        code: str | int | None = run(_dispatch)
    except SystemExit as error:
        code = error.code
    if code in [128 + number for number in interruption.SIGNALS] and sys.argv[1:2] != ["train"]:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(int(code))
    raise SystemExit(code)
