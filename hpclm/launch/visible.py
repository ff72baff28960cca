"""Whether what a job's set-up names exists, as far as the machine that submits can see; compute nodes may have other files."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpclm.config import JobConfig, RunConfig
from hpclm.launch import setup
from hpclm.node import processes
from hpclm.node.processes import NoAnswerError
from hpclm.rundir.logs import fault
from hpclm.terminal import say

SECONDS = 20.0  # that loading the modules may take


def problems(run: RunConfig) -> list[str]:
    """Files that are missing from the file system of the run directory, which all nodes share."""
    return [f"{text} does not exist" for text, path in _missing(run.job) if _is_shared(path, Path(run.out))]


def warn(run: RunConfig) -> None:
    """Print what is missing here and may exist on compute nodes."""
    job = run.job
    texts = [f"{text} does not exist here" for text, path in _missing(job) if not _is_shared(path, Path(run.out))]
    if fault := _rehearsed(job):
        names = [f"job.{name}" for name in ("modules", "conda") if getattr(job, name)]
        texts.append(f"{' and '.join(names)} cannot be loaded here: {fault}")
    for text in texts:
        say(f"warning: {text}; the job fails if its nodes lack it too", file=sys.stderr)


def _missing(job: JobConfig) -> Iterator[tuple[str, Path]]:
    """What does not exist here: the setting and its path, in words, and the path."""
    named = [("job.venv", job.venv and f"{job.venv}/bin/activate")]
    named += [("job.conda", f"{job.conda}/bin/python")] if job.conda and job.conda.startswith("/") else []
    named += [("job.mounts", mount.partition(":")[0]) for mount in job.mounts]
    image = job.container or ""
    if "://" not in image and (job.runtime == "apptainer" or image.startswith("/")) and job.runtime != "docker":
        named.append(("job.container", image))
    for setting, text in named:
        path = Path(text or "/").expanduser().absolute()
        if "$" not in str(path) and not path.exists():
            yield f"{setting}: {path}", path


def _is_shared(path: Path, out: Path) -> bool:
    """Whether ``path`` would be on the file system of ``out``; every machine has a root directory of its own."""
    folder, others = _existing(path), _existing(out)
    return folder != Path("/") and folder.stat().st_dev == others.stat().st_dev


def _existing(path: Path) -> Path:
    """The nearest folder above ``path`` that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _rehearsed(job: JobConfig) -> str:
    """Why the modules or the conda environment of a job cannot be loaded here; empty if they can."""
    if not (job.modules or (job.conda and not job.conda.startswith("/"))):
        return ""
    try:
        code, _, errors = processes.ask(["bash", "-c", "\n".join(setup.loading(replace(job, venv=None)))], SECONDS)
    except NoAnswerError as error:
        return str(error)
    return (fault(errors) or f"exit code {code}") if code else ""
