"""What was run: the settings, and for every attempt its command, versions and git revision."""

import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from hpclm import __version__, config
from hpclm.cluster import bootstrap, secrets
from hpclm.cluster.team import Team
from hpclm.config.mixture import mixture
from hpclm.errors import DivergedError
from hpclm.job.rows import ATTEMPT, END, Check, sane

log = logging.getLogger(__name__)
LIBRARIES = (
    "torch",
    "numpy",
    "deepspeed",
    "fairscale",
    "safetensors",
    "tokenizers",
    "gigatoken",
    "sentencepiece",
    "omegaconf",
)


MOST = 3  # starts of a job without a checkpoint in between, which was not made because they failed


def start(out: Path, run: config.RunConfig, team: Team, step: int, steps: int | None) -> int:
    """Write config.yaml and add a line to attempts.jsonl: an attempt begins after ``step``, of ``steps`` in all; its number."""
    config.dump(replace(run, data=absolute(run.data)), out / "config.yaml")
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_step": step,
        "steps": steps,
        "launcher": team.launcher,
        "size": team.size,
        "hosts": list(dict.fromkeys(team.hosts)),
        **bootstrap.job(),
        "command": secrets.Redactor().command([sys.executable, *sys.orig_argv[1:]]),
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "hpclm": __version__,
        "git": git_revision(),
        "python": platform.python_version(),
        "versions": versions(),
    }
    with (out / "attempts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return len(rows(out / "attempts.jsonl", ATTEMPT))


def end(out: Path, attempt: int, code: int, step: int) -> None:
    """Add a line to ends.jsonl: the attempt of this number ended in good order, with exit code ``code``, saved at ``step``."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "attempt": attempt, "code": code, "step": step}
    try:
        with (out / "ends.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:  # the exit code says the same, and the state is saved
        log.warning("%s cannot be written: %s", out / "ends.jsonl", error.strerror)


def check_progress(out: Path, step: int) -> None:
    """DivergedError when Slurm has started this very job again and again from ``step``, and no start lived to a checkpoint."""
    job = bootstrap.job().get("job_id")
    before = rows(out / "attempts.jsonl", ATTEMPT)
    orderly = [row.get("attempt") for row in rows(out / "ends.jsonl", END)]
    failed = 0
    for number in range(len(before), 0, -1):
        row = before[number - 1]
        if not job or row.get("job_id") != job or row.get("from_step") != step or number in orderly:
            break
        failed += 1
    if failed >= MOST:
        raise DivergedError(
            f"job {job} has started {failed} times from step {step} and never came to a checkpoint: it is not started again. "
            f"See {out / 'log.txt'} for how the starts ended, then hpclm resume {out}"
        )


def rows(path: Path, fields: Mapping[str, Check]) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects, empty where ``fields`` are not what they must be; none where there is no file."""
    found = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                found.append(row if sane(row, fields) else {})
    return found


def absolute(data: config.DataConfig) -> config.DataConfig:
    """``data`` with paths that mean the same from any folder."""

    def whole(path: str) -> str:
        return str(Path(path).absolute())

    def listed(words: list[str]) -> list[str]:
        paths = set(mixture(words, "data").prefixes) if words else set()
        return [whole(word) if word in paths else word for word in words]

    return replace(
        data,
        prefix=data.prefix and whole(data.prefix),
        blend=listed(data.blend),
        train=listed(data.train),
        valid=listed(data.valid),
        test=listed(data.test),
        validation=[f"{name}={whole(path)}" for name, _, path in (word.partition("=") for word in data.validation)],
        index_cache=data.index_cache and whole(data.index_cache),
        tokenizer_files=[whole(file) for file in data.tokenizer_files],
    )


def versions() -> dict[str, str]:
    """Installed versions of the libraries that decide a run's numbers."""
    found: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Commit of the source tree hpclm runs from, with "-dirty" when files differ; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
