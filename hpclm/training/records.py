"""The record of a run: its settings, and for every attempt its command, versions and git revision."""

import getpass
import logging
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from hpclm import __version__, config
from hpclm.base import files
from hpclm.base.errors import ConfigError, DivergedError
from hpclm.config import compose
from hpclm.config.compose import dumped
from hpclm.config.data import absolute
from hpclm.config.fields import path_separator
from hpclm.distributed.context import DistributedContext
from hpclm.node import ends, secrets
from hpclm.node.job import OwnJob
from hpclm.rundir import code, config_history, events
from hpclm.rundir.events import AttemptEvents
from hpclm.rundir.summary import KILLED

log = logging.getLogger(__name__)
LIBRARIES = (
    *("torch", "numpy", "deepspeed", "fairscale", "safetensors"),
    *("tokenizers", "gigatoken", "sentencepiece", "omegaconf"),
)
OF_FIRST_STEP = ("model.init_std", "scaler.initial", "checkpoint.init_from")
"""Settings that only affect the state before the first step."""
MAX_STARTS = 3  # starts of a job from one step, without a checkpoint in between


def requested_step(out: Path, step: int | None, job: OwnJob) -> int | None:
    """The ``step`` that --from names; None if this ``job`` went back to it before the scheduler started it again."""
    if step is None:
        return None
    for event in events.read_or_refuse(out):
        mine = job.id and event.get("job_id") == job.id
        if mine and event.get("back_to") == step and (event.get("restart") or 0) < job.restart:
            return None
    return step


def log_restart(out: Path, context: DistributedContext) -> str:
    """How the last start ended; empty for the first one. Logged if the scheduler, or torchrun's agent, has restarted the ranks."""
    job = context.job
    recorded = events.read_or_refuse(out)
    attempts = events.attempts(recorded)
    end = events.last_end(recorded)
    ending = end.get("ending") or end.get("cause") or (KILLED if attempts else "")
    by_agent = ends.inside_the_job()
    began = attempts[-1].began if attempts else {}
    same_start = {**began, **job.row()} == began  # after a phase
    by_scheduler = job.restart and context.world.launcher != "local" and not same_start
    if not by_agent and not by_scheduler:
        return ending
    if by_agent:
        ending = by_agent
    else:
        hosts = events.whole(out, began).get("hosts") if attempts else None
        why = [ending or "it ended before training started", *job.troubles(hosts or [])]
        ending = f"start {job.restart + 1} of job {job.id}; why the last one ended: {'; '.join(why)}"
    log.warning("%s", ending)
    return ending


def check_progress(out: Path, step: int, job: OwnJob) -> None:
    """DivergedError if the scheduler has started this ``job`` MAX_STARTS times from ``step`` and no start reached a checkpoint.

    A start counts however it ended: killed, warned before the first save, or too early to leave a record. A clean exit does not count
    if the scheduler has not restarted the job since: somebody started it again by hand.
    """
    if not job.id:
        return
    starts = 0
    later = job.restart  # the restart count of the start after ``attempt``
    for attempt in reversed(events.attempts(events.read_or_refuse(out))):
        began = attempt.began
        restart = later if began.get("restart") is None else began["restart"]
        by_hand = attempt.orderly and restart == later
        if began.get("job_id") != job.id or began.get("from_step") != step or by_hand:
            break
        starts += max(1, later - restart)
        later = restart
    if starts >= MAX_STARTS:
        raise DivergedError(
            f"job {job.id} has started {starts} times from step {step} and never reached a checkpoint; it will not be started again. "
            f"See {out / 'log.txt'} for how the starts ended, then hpclm resume {files.typed(out)}"
        )


def start(
    run: config.RunConfig, context: DistributedContext, generation: int | None, facts: Mapping[str, Any]
) -> list[AttemptEvents]:
    """Write config.yaml and record that an attempt begins; returns all attempts.

    ``generation``: generation of the lease. ``facts``: more for the record, such as the step that the attempt resumes from.
    """
    out = Path(run.out)
    _, used = config_history.replace(out, dumped(replace(run, data=absolute(run.data))))
    line = {
        "generation": generation,
        **facts,
        "config": used,
        "launcher": context.world.launcher,
        "size": context.size,
        "nodes": len(context.hosts),
        "hosts": list(context.hosts),
        **context.job.row(),
        "began": round(context.world.began, 3),
        "command": _command(),
        "by": _user(),
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "machine": files.here(),
        "pid": os.getpid(),
        "hpclm": __version__,
        "git": code.revision(),
        "digest": code.digest(code.sources(run.modules())),
        "python": platform.python_version(),
        "versions": versions(),
    }
    for last in events.attempts(events.read_events(out))[-1:]:
        warn_of_other_code(last.began, line)
        log_changes(out, last.began, line, facts["from_step"])
    events.append(out, "began", **line)
    return events.attempts(events.read_events(out))


def _user() -> str:
    """The name of the user; the number, if it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def _command() -> str:
    """The command line of this process, without secrets."""
    if any("kernel_launcher" in word for word in sys.orig_argv):
        return "hpclm.train in a notebook"
    return shlex.join(map(secrets.Redactor(), [sys.executable, *sys.orig_argv[1:]]))


def versions() -> dict[str, str]:
    """Installed versions of the libraries that affect a run's numbers."""
    installed: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def warn_of_other_code(before: Mapping[str, Any], line: Mapping[str, Any]) -> None:
    """Warn if this attempt runs other code than the last one. ``before`` and ``line``: the records of how the attempts began."""
    if before.get("digest", line["digest"]) == line["digest"]:
        return
    if before.get("git") != line["git"]:
        change = f"git {before.get('git')}, now {line['git']}"
    else:
        change = "files have changed"
        if line["git"]:
            change += f", at git {line['git']}"
    log.warning(
        "the code is not the one that the last attempt ran: %s; job.snapshot=true keeps a job to the code it was submitted with",
        change,
    )


def log_changes(out: Path, last: Mapping[str, Any], line: Mapping[str, Any], step: int) -> None:
    """Log the settings that differ between two attempts, and warn of those without effect after ``step``.

    ``last`` and ``line``: the records of how the attempts began. Settings that cannot be read are not compared.
    """
    with suppress(ConfigError):
        old, new = (compose.flat_of_run(out, str(attempt.get("config", ""))) for attempt in (last, line))
        before, now = (Path(str(attempt.get("folder", ""))) for attempt in (last, line))
        changed = {
            key: value
            for key, value in new.items()
            if old.get(key, value) != value and _from_folder(before, key, old[key]) != _from_folder(now, key, value)
        }
        if changed:
            changes = (f"{key}={_typed(value)} (was {_typed(old[key])})" for key, value in changed.items())
            log.info("settings have changed since the last attempt: %s", ", ".join(changes))
        without_effect = [f"{key}={_typed(changed[key])}" for key in OF_FIRST_STEP if key in changed]
        if step and without_effect:
            text = "%s has no effect: the run resumes from step %d and restores its state"
            log.warning(text, ", ".join(without_effect), step)


def _from_folder(folder: Path, key: str, value: Any) -> Any:
    """The value of a setting, with paths that are relative to ``folder`` made absolute."""
    separator = path_separator(key)
    if separator is None or not value or isinstance(value, dict):
        return value
    if isinstance(value, list):
        return [_from_folder(folder, key, part) for part in value]
    parts = str(value).split(separator) if separator else [str(value)]
    return [os.path.normpath(folder / part) for part in parts]


def _typed(value: Any) -> Any:
    return "null" if value is None else value
