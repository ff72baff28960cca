"""Train the runs of a sweep on this machine, each in a separate process: one after another, or several at a time.

The same command continues a sweep: it skips runs that are done, and continues others from their last checkpoints.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hpclm.base import files, folders, paths, terminal
from hpclm.base.errors import ConfigError, ExitCode, HpclmError, shell_code
from hpclm.base.terminal import many, say
from hpclm.config import RunConfig
from hpclm.distributed import bootstrap
from hpclm.launch import arguments, prechecks, process, send
from hpclm.launch.arguments import Variant
from hpclm.launch.child import Forward
from hpclm.launch.done import diverged, nothing_left
from hpclm.launch.jobs import States, state
from hpclm.launch.phases import PhaseEnds
from hpclm.node import environment, failures, gpus, parent, preemption, processes, python, secrets, threads
from hpclm.preprocess import command_line
from hpclm.rundir import rows
from hpclm.rundir import runs as run_folders
from hpclm.training.start import RunStart

if TYPE_CHECKING:
    from hpclm.base.progress import ProgressBar

POLL = 0.2  # seconds between checks of the processes
UPDATE = 1.0  # seconds between updates of a progress bar
PATIENCE = 5.0  # seconds for a scheduler to answer about runs that were jobs before
DEVICES = "CUDA_VISIBLE_DEVICES"
Words = Callable[[Path], Sequence[str]]
"""Returns the arguments of hpclm that start the run with a given config.yaml."""


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, and the report that compares them."""

    runs: Sequence[RunConfig]
    """The settings of the runs, with absolute paths."""
    report: Path
    """The path of the report."""
    command: Sequence[str]
    """The words that the user typed."""


def of_variants(runs: Sequence[RunConfig], variants: Sequence[Variant], command: Sequence[str]) -> Sweep:
    """The sweep of ``runs``, one for each of ``variants``."""
    keys = dict.fromkeys(word.partition("=")[0].rpartition(".")[2] for word in variants[0].overrides)
    common = Path(runs[0].out.removesuffix(variants[0].suffix)).absolute()
    return Sweep(runs, Path(f"{common}-{'-'.join(keys)}-report.html"), command)


def check_alone(env: Mapping[str, str] = os.environ) -> None:
    """ConfigError if a launcher has started this process as one of its ranks."""
    world = bootstrap.detect(env, alone=False)
    if world.launcher != "single":
        raise ConfigError(
            f"--sweep starts a process for each run, but {world.launcher} has started this process as rank {world.rank} of "
            f"{world.size}; start it without {world.launcher}, or use hpclm submit --sweep"
        )


def train(settings: Sequence[str], swept: Sequence[str], parallel: int, typed: Sequence[str]) -> int:
    """Train each run of a sweep in one process; returns the exit code.

    ``settings``: the settings of all runs. ``swept``: the settings that differ, in the form key=a,b,c. ``typed``: all
    arguments. ConfigError with every problem, before the first run starts.
    """
    check_alone()
    variants = arguments.variants(swept)
    for variant in variants:  # before a dataset is written
        command_line.planned([*settings, *variant.overrides], typed)
    runs = checked([composed(settings, variant, typed) for variant in variants])
    of_each = shares_here(min(parallel, len(runs)), 1, runs)
    return run(of_variants(runs, variants, ("hpclm", "train", *typed)), train_words, of_each)


def composed(settings: Sequence[str], variant: Variant, typed: Sequence[str]) -> RunConfig:
    """The settings of one run that trains in one process, with absolute paths."""
    run = command_line.resolved_settings([*settings, *variant.overrides], typed, process.check_before_dataset)
    return arguments.whole(arguments.varied(run, variant))


def checked(runs: Sequence[RunConfig]) -> list[RunConfig]:
    """The complete settings of runs that train in one process each; warns of settings without effect. ConfigError with every problem."""
    problems = list[str]()
    starts = list[RunStart]()
    for run in runs:
        alone = replace(run, job=replace(run.job, nodes=1, gpus=1, hostfile=None))
        try:
            starts.append(prechecks.check_submission(alone, "local"))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    for warning in dict.fromkeys(reason for start in starts for reason in start.without_effect()):
        say(f"warning: {warning}", file=sys.stderr)
    return [replace(start.settings, job=run.job) for start, run in zip(starts, runs, strict=True)]


def train_words(path: Path) -> tuple[str, ...]:
    """The arguments of hpclm that train the run with the settings at ``path`` in one process."""
    return "train", paths.literal(path)


def submit_words(cluster: str, path: Path) -> tuple[str, ...]:
    """The arguments of hpclm that start the run with the settings at ``path`` by ``cluster``: local, mpirun or interactive."""
    how = ("--interactive",) if cluster == "interactive" else ("--cluster", cluster)
    return "submit", "--config", paths.literal(path), *how, f"out={paths.literal(path.parent)}"


def shares_here(parallel: int, processes_of_run: int, runs: Sequence[RunConfig]) -> list[dict[str, str]]:
    """``shares`` of this machine for ``parallel`` of the ``runs`` at a time."""
    available = 0
    if parallel > 1 and any(run.engine.device != "cpu" for run in runs):  # counting GPUs takes seconds
        available = gpus.count(environment.inherited())
    return shares(parallel, processes_of_run, available)


def shares(
    parallel: int, processes_of_run: int, available: int, env: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Environment variables that divide the machine's ``available`` GPUs among ``parallel`` runs; without GPUs, its cores.

    ConfigError if there are too few GPUs.
    """
    if parallel == 1:
        return [{}]
    count = parallel * processes_of_run
    if not available:
        share = {"OMP_NUM_THREADS": str(threads.per_process(count, env))}
        return [share for _ in range(parallel)]
    if count > available:
        possible = available // processes_of_run
        way_out = f"give --parallel {possible}" if possible else f"give job.gpus={available}"
        raise ConfigError(
            f"--parallel {parallel}: {parallel} runs of {many(processes_of_run, 'GPU')} need {count}, but this machine has {available}; "
            f"{way_out}"
        )
    names = env.get(DEVICES, ",".join(map(str, range(available)))).split(",")
    visible = [",".join(names[start : start + processes_of_run]) for start in range(0, count, processes_of_run)]
    return [{DEVICES: devices.replace(" ", "")} for devices in visible]


class Child:
    """A run of a sweep that trains in a separate process."""

    def __init__(
        self,
        run: RunConfig,
        number: int,
        count: int,
        words: Words,
        share: Mapping[str, str],
        output: IO[bytes],
        row: int,
    ):
        """Start ``run``, the ``number``-th of ``count``. Its output goes to ``output``, and ``row`` of the terminal shows its progress."""
        self.number = number
        self.name = f"run {number} of {count}"
        self.output = output
        self.row = row
        self.out = Path(run.out)
        self.phases = PhaseEnds(self.out)
        with send.claimed(run):  # LockedError if another process trains it
            command = python.command("hpclm", *words(self.out / "config.yaml"))
        self.process = subprocess.Popen(
            command,
            env={**environment.inherited(), **share},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in a terminal reaches the parent only
            preexec_fn=partial(parent.end_with, os.getpid(), signal.SIGTERM),
        )
        self._bar = self._new_bar(None, 0)
        self._shown = time.monotonic()

    def _new_bar(self, total: int | None, step: int) -> "ProgressBar":
        from hpclm.base.progress import ProgressBar

        title = f"{self.name}  {self.out.name}  step "
        return ProgressBar(total, initial=step, desc=title, unit="", position=self.row, leave=False)

    def show(self) -> None:
        """Update its progress bar, at most once a second."""
        if self._bar.disable or time.monotonic() - self._shown < UPDATE:
            return
        self._shown = time.monotonic()
        run = run_folders.read_run(self.out)
        if run.total != self._bar.total:
            self._bar.close()
            self._bar = self._new_bar(run.total, run.step)
        loss = run.summary.get("loss")
        self._bar.beside = [f"loss {loss:.4f}"] if loss is not None else []
        self._bar.update(run.step - self._bar.n)

    def ended(self, code: int) -> str:
        """A line on how it has ended, with exit code ``code``."""
        self._bar.close()
        status = state(self.out, PATIENCE)
        text = f"{self.name}  {files.shown(_short(self.out))}: "
        if code in (ExitCode.DONE, ExitCode.REQUEUE):
            loss = status.run.summary.get("loss")
            return text + status.how() + (f", loss {loss:.4f}" if loss is not None else "")
        printed = rows.tail(self.output.name).split("\n")
        why = status.ending or next((line for line in reversed(printed) if line.strip()), "it left no message")
        return f"{text}failed with exit code {code}: {why}"


def run(sweep: Sweep, words: Words, shares: Sequence[Mapping[str, str]]) -> int:
    """Train the runs that are not done yet, and compare all runs; returns the exit code."""
    unfinished, code = train_all(sweep.runs, words, shares)
    if code == ExitCode.INTERRUPTED:
        return code
    return _finish(sweep, unfinished, code)


def train_all(runs: Sequence[RunConfig], words: Words, shares: Sequence[Mapping[str, str]]) -> tuple[list[Path], int]:
    """Train the ``runs`` that are not done yet, as many at a time as there are ``shares``. A run that fails does not affect the others.

    Returns the runs that a signal has stopped or kept from starting, and the exit code of the failed runs, 1 if their codes
    differ. ``runs`` have absolute paths.
    """
    per_run = failures.PerRunErrors(2)
    left = deque(range(1, len(runs) + 1))
    children = list[Child]()
    stopped = list[Path]()
    forward = Forward(lambda: [child.process.pid for child in children], {}, signal.SIGINT)
    announced = False
    with folders.temporary_folder() as folder, preemption.handling(forward):
        try:
            while children or (left and not forward.received):
                free = [row for row in range(len(shares)) if row not in [child.row for child in children]]
                while left and free and not forward.received:
                    with per_run:
                        child = _started(left.popleft(), runs, words, shares, free[0], folder, per_run.codes)
                        if child:
                            del free[0]
                            children.append(child)
                            for number in list(forward.received):  # they came before the run had started
                                processes.send_signal(child.process.pid, number)
                if forward.received and children and not announced:
                    announced = True
                    _tell(
                        f"{signal.Signals(forward.received[0]).name}: the running ones save and exit, and no other run starts"
                    )
                time.sleep(POLL)
                for child in [*children]:
                    code = child.process.poll()
                    if code is None:
                        child.show()
                        continue
                    children.remove(child)
                    _tell(child.ended(shell_code(code)))
                    if child.phases.another(code, forward.received):
                        left.appendleft(child.number)
                    elif forward.received and code in (ExitCode.REQUEUE, *(-number for number in preemption.WARNINGS)):
                        stopped.append(child.out)
                    elif code:
                        per_run.codes.add(shell_code(code))
        except KeyboardInterrupt:
            for child in children:
                child.process.wait()
            say("second Ctrl-C: ended without saving", file=sys.stderr)
            return [Path(run.out) for run in runs], ExitCode.INTERRUPTED
    return [*stopped, *(Path(runs[number - 1].out) for number in left)], per_run.code


def _started(
    number: int,
    runs: Sequence[RunConfig],
    words: Words,
    shares: Sequence[Mapping[str, str]],
    row: int,
    folder: Path,
    codes: set[int],
) -> Child | None:
    """Start run ``number`` of ``runs``; returns None if it has nothing to do.

    A run that has diverged is not started again; its exit code is added to ``codes``.
    """
    run = runs[number - 1]
    title = f"run {number} of {len(runs)}  {files.shown(_short(Path(run.out)))}"
    ending = nothing_left(run)
    if ending:
        _tell(f"{title}: {ending}; skipped")
        return None
    ending = diverged(run)
    if ending:
        codes.add(ExitCode.DIVERGED)
        again = f"hpclm resume {files.typed(_short(Path(run.out)))}"
        _tell(f"{title}: {ending}; not started again with the same settings ({again} does)")
        return None
    with (folder / f"{number}.log").open("wb") as output:
        child = Child(run, number, len(runs), words, shares[row], output, row)
    if not sys.stderr.isatty():
        _tell(f"{title}: started; hpclm logs -f {files.typed(_short(Path(run.out)))} follows it")
    return child


def _finish(sweep: Sweep, unfinished: Sequence[Path], code: int) -> int:
    """Compare the runs, which have ended with ``code``; returns the exit code.

    ``unfinished``: the runs that a signal has stopped or kept from starting.
    """
    from hpclm.reporting import comparison, page

    statuses = States(PATIENCE).of([run_folders.read_run(Path(run.out)) for run in sweep.runs])
    trained = [status for status in statuses if status.run.attempt]
    if trained:
        say("\n" + "\n".join(comparison.table(trained)))
    if unfinished:
        are = "is" if len(unfinished) == 1 else "are"
        command = shlex.join(map(secrets.Redactor(), sweep.command))
        count = f"{len(unfinished)} of {len(sweep.runs)} runs"
        say(f"\n{count} {are} not done; to continue, repeat the command: {command}")
        return ExitCode.REQUEUE
    if trained:
        try:
            report, *_ = page.write([status.run.out for status in trained], sweep.report, False)
            say(f"\nreport  {files.shown(_short(report))}")
        except HpclmError as error:  # a library is missing, for example
            say(f"\nno report: {error}", file=sys.stderr)
    return code


def _tell(text: str) -> None:
    """Print a line on standard error, above the progress bars."""
    from hpclm.base.progress import Bar  # loads tqdm, which hpclm submit does not need

    Bar.write(terminal.line(text), file=sys.stderr)


def _short(path: Path) -> Path:
    """``path`` relative to the current folder, if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
