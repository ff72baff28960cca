"""Whether the paths that a job's set-up names exist, as far as the machine that submits can see."""

import sys
from collections.abc import Iterator
from pathlib import Path

from hpclm.config import JobConfig, RunConfig
from hpclm.terminal import say


def problems(run: RunConfig) -> list[str]:
    """Paths that are missing from the file system of the run directory, which all nodes share."""
    return [f"{text} does not exist" for text, path in _missing(run.job) if _is_shared(path, Path(run.out))]


def warn(run: RunConfig) -> None:
    """Print what is missing here and may exist on compute nodes."""
    for text, path in _missing(run.job):
        if not _is_shared(path, Path(run.out)):
            say(f"warning: {text} does not exist here; the job fails if its nodes lack it too", file=sys.stderr)


def _missing(job: JobConfig) -> Iterator[tuple[str, Path]]:
    """The settings whose paths do not exist here, with the path."""
    paths = [("job.venv", job.venv and f"{job.venv}/bin/activate")]
    paths += [("job.conda", f"{job.conda}/bin/python")] if job.conda and job.conda.startswith("/") else []
    paths += [("job.mounts", mount.partition(":")[0]) for mount in job.mounts]
    image = job.container or ""
    if "://" not in image and (job.runtime == "apptainer" or image.startswith("/")) and job.runtime != "docker":
        paths.append(("job.container", image))
    for setting, text in paths:
        path = Path(text or "/").absolute()
        if not path.exists():
            yield f"{setting}: {path}", path


def _is_shared(path: Path, out: Path) -> bool:
    """Whether ``path`` would be on the file system of ``out``; every machine has a root directory of its own."""
    folder, run_folder = (next(f for f in (p, *p.parents) if f.is_dir()) for p in (path, out))
    return folder != Path("/") and folder.stat().st_dev == run_folder.stat().st_dev
