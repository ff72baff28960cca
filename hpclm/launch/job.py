"""The supervisor of a job, which the last line of its script runs: ``python -m hpclm.launch.job [FILE] key=value ...``

It loads the settings, starts the ranks through srun, mpirun or torchrun, forwards signals to them, and waits. Then it records how
they ended, and asks the scheduler for another start if that may help. Its exit code is that of the cause, not of the launcher.
"""

import itertools
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpclm.base import folders
from hpclm.base.errors import ConfigError, DivergedError, ExitCode
from hpclm.base.terminal import say
from hpclm.config import RunConfig
from hpclm.distributed import network
from hpclm.launch import child, container, mpi, srun
from hpclm.launch.outcome import Outcome, by_signal
from hpclm.launch.schedulers import current_job
from hpclm.node import ends, environment, failures, import_errors, parent, preemption, slurm
from hpclm.node.job import OwnJob
from hpclm.node.processes import MissingProgramError, NoAnswerError
from hpclm.parser import EPILOG, Parser
from hpclm.preprocess import command_line
from hpclm.rundir import events

MAX_STARTS = 3  # starts in a row that may end before training begins
PATIENCE = 600.0  # seconds for the scheduler to answer
EARLY = 90.0  # seconds: Slurm's warning before the time limit may come this much too early
PAUSE = 10.0  # seconds between two questions
OF_JOB = re.compile(r"\s*job\s*[.=]")
HONOURED = re.compile(r"\s*job[.](notify|warn_seconds)\b")
"""The settings in the section job that ranks use."""
OF_SUBMISSION = (slurm.CLUSTERS, slurm.TOKEN)
"""Variables of the machine that submits, removed in a job. Slurm's commands then ask the job's own cluster, as the user of this process."""


def main(argv: list[str]) -> int:
    """Run the job with the settings ``[FILE] key=value ...``; returns the exit code of the cause of its end."""
    words = parser().values(argv)["settings"]
    environment.forget(OF_SUBMISSION)
    settings = settings_of(words)
    job = current_job(settings.job.cluster)
    if job.id:
        _say(f"start {job.restart + 1} of {replace(job, restart=0)}")
    outcome = Outcome(Path(settings.out), start_name(job), settings.job.template, job)
    launcher = child.Launcher({})
    with preemption.handling(launcher.forward):
        code, why = outcome.settle(_run(launcher, settings, words, outcome.variables))
        while outcome.next_phase(code, launcher.forward.received):
            _say("the ranks are started again for the next phase, in the same job")
            code, why = outcome.settle(_run(launcher, settings, words, outcome.variables))
    if code == ExitCode.REQUEUE and not why:
        why = job.ending(settings.job.warn_seconds + EARLY)
    outcome.tell(code, why)
    if not code:
        return code
    idle = idle_starts(settings, job, code, why)
    if not starts_again(code):
        return code
    if idle >= MAX_STARTS:
        _say(f"{MAX_STARTS} starts in a row ended before training began: the job is not started again")
        return DivergedError.exit_code
    requeue(job)
    return code


def parser() -> Parser:
    """The supervisor's parser of its command line."""
    options = Parser(
        prog="python -m hpclm.launch.job",
        description="Run a job: the last line of its script. It starts the ranks, waits for them, and has the job started again.",
        epilog=EPILOG,
    )
    options.add_settings("one settings file or preset, and overrides", files=True, nargs="+")
    return options


def settings_of(words: Sequence[str]) -> RunConfig:
    """The job's settings, with the nodes and processes that it got; ConfigError if the job cannot train with them."""
    settings, dataset = command_line.planned(words)
    if dataset is not None and not dataset.written:
        raise ConfigError(
            f"a job does not tokenize the text of data=; run {dataset.preprocess}, which prints what to set instead"
        )
    missing = settings.missing()
    if missing:
        raise ConfigError(missing)
    nodes, tasks = allocation(settings)
    settings = replace(settings, job=replace(settings.job, nodes=nodes, gpus=tasks))
    settings.plan(nodes * tasks)
    return settings


def _run(launcher: child.Launcher, settings: RunConfig, words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run the ranks to their end; returns the launcher's exit code. ``variables``: added to the ranks' environment."""
    start = ranks(settings, words)
    launcher.forward.signals = start.signals
    if launcher.forward.received:
        _say("a signal came before the processes were started")
        return ExitCode.REQUEUE
    options: dict[str, Any] = {}
    if start.command[0] != "srun":  # Slurm lets its steps save before it ends them
        options["preexec_fn"] = partial(parent.end_with, os.getpid(), signal.SIGTERM)
    return launcher.run(start.command, {**start.env, **variables}, **options)


def allocation(settings: RunConfig, env: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The nodes of this job, and the processes of each: Slurm's counts, otherwise those of the settings."""
    if slurm.JOB not in env:
        return settings.job.nodes, settings.job.gpus
    return max(1, slurm.number(env, slurm.NODES)), max(1, slurm.number(env, slurm.TASKS_OF_A_NODE))


@dataclass(frozen=True)
class RanksCommand:
    """The command that starts the ranks of a job."""

    command: list[str]
    env: dict[str, str]
    signals: Mapping[int, int]
    """Signal -> the signal to send to the command in its place."""


def ranks(settings: RunConfig, words: Sequence[str]) -> RanksCommand:
    """The command that starts the ranks of a job. ``words``: the arguments of the supervisor."""
    job = settings.job
    in_slurm = slurm.JOB in os.environ
    if not in_slurm and job.nodes > 1 and job.template != "mpirun":
        raise ConfigError(
            f"job.nodes={job.nodes} with job.template={job.template} needs Slurm; use job.template=mpirun"
        )
    if job.container:
        interpreter = container.PYTHON
        env = container.environment_of_ranks(os.environ) | job.env
    else:
        interpreter = sys.executable
        env = environment.inherited() | job.env
    python = [interpreter, "-P", "-u", "-m"]
    train = ["hpclm.train", *(word for word in words if not OF_JOB.match(word) or HONOURED.match(word))]
    if job.template == "mpirun":
        launch = mpi.plan(settings)
        return RanksCommand(
            launch.command([*python, *train], [*job.env, ends.FOLDER]), launch.env | slurm.EXPORT_ALL, launch.signals
        )
    env = {name: value for name, value in env.items() if not slurm.FIRST_START.fullmatch(name)}
    env[slurm.ADDRESSES] = " ".join(network.own_addresses(settings.cluster.interface)[:-1])
    env.setdefault(srun.WAIT, "60")
    network.hide_lookup_warnings(env)
    cores = slurm.cores_per_task(env)
    if in_slurm and job.template == "srun":
        program = [*container.words(settings), *python, *train]
        return RanksCommand(srun.step(job.nodes, job.gpus, cores, program), env, child.SIGNALS)
    env.pop(slurm.CORES_PER_TASK, None)
    agent = [*python, *torchrun_agent(settings), *train]
    if in_slurm:
        return RanksCommand(srun.step(job.nodes, 1, cores * job.gpus, agent), env, child.SIGNALS)
    return RanksCommand(agent, env, {})


def torchrun_agent(settings: RunConfig, env: Mapping[str, str] = os.environ) -> list[str]:
    """The words that run torchrun's agent on each node of a job."""
    start = slurm.start_of_job(env) or str(os.getpid())
    with network.listen(network.candidates(start)) as listener:
        port = listener.getsockname()[1]
    return [
        "hpclm.launch.torchrun",
        f"--nnodes={settings.job.nodes}",
        f"--nproc-per-node={settings.job.gpus}",
        f"--max-restarts={settings.job.restarts}",
        f"--rdzv-id={start}",
        f"--rdzv-endpoint={env.get(slurm.NODE_NAME) or socket.gethostname()}:{port}",
    ]


def start_name(job: OwnJob) -> str:
    """A name for this start of the job."""
    return f"{job.id}-{job.restart}" if job.id else f"{socket.gethostname()}-{os.getpid()}"


def starts_again(code: int) -> bool:
    """Whether to start again after exit code ``code``: the run has saved, or something killed it."""
    return code == ExitCode.REQUEUE or by_signal(code)


def idle_starts(settings: RunConfig, job: OwnJob, code: int, cause: str) -> int:
    """Record how this start ended. Returns how many starts in a row, this one included, have ended before training began."""
    out = folders.private_folder(settings.out, "run directory")
    signal = code - 128 if 128 < code < 160 else None
    events.append(out, "ended", code=code, cause=cause, signal=signal, **job.row())
    mine = [event for event in events.read_or_refuse(out) if event.get("job_id") == job.row().get("job_id")]
    trained = {event.get("restart") for event in events.of_kind(mine, "began")}
    starts = [event.get("restart") for event in events.of_kind(mine, "ended") if not event.get("state")]
    return len([*itertools.takewhile(lambda start: start not in trained, reversed(starts))])


def requeue(job: OwnJob) -> None:
    """Requeue the job, if it still runs and may be restarted."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            if not job.requeue_or_raise():
                why = "it is being ended or restarted already, or --no-requeue forbids it"
                _say(f"the supervisor does not start the job again: {why}")
            return
        except MissingProgramError as error:
            _say(f"{error}: the job is not started again")
            return
        except NoAnswerError as error:
            if time.monotonic() > until:
                _say(f"{error}: the job is not started again")
                return
        time.sleep(PAUSE)


def _say(text: str) -> None:
    say(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    import_errors.report_uncaught()
    sys.exit(failures.run(main))
