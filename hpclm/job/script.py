"""The script of a job: a template of slurm/, in which the job's options and set-up take their places.

A template works by hand as it stands. Its #SBATCH lines are defaults that the job's own replace, and its line that begins
with ``# SET-UP`` becomes the job's set-up and arguments; nothing else is touched.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpclm import files
from hpclm.config import JobConfig, RunConfig
from hpclm.config.job import TEMPLATES
from hpclm.errors import ConfigError
from hpclm.job import setup
from hpclm.job.options import Options, directive, options

SHIPPED = Path(__file__).parents[2] / "slurm"
MARK = "# SET-UP"
_DIRECTIVE = re.compile(r"#SBATCH\s+--([A-Za-z-]+)(?:[=\s]+(.*))?")


def render(config: RunConfig, path: Path, folders: Iterable[Path] = ()) -> str:
    """The script of the job that trains by the settings at ``path``, OUT/config.yaml; ConfigError when bash cannot read it.

    ``folders``: what a container must see of the data.
    """
    source = template(config.job)
    asked = options(config, path.parent)
    body = [*setup.lines(config, path, folders)]
    text = "\n".join(_filled(_lines(source), asked, body)) + "\n"
    check(text, source)
    return text


def template(job: JobConfig) -> Path:
    """Where the template lies that ``job`` names."""
    wanted = "container" if job.container and job.template == "srun" else job.template
    if wanted not in TEMPLATES:
        return files.readable(Path(wanted).expanduser(), "job.template")
    path = SHIPPED / f"{wanted}.sbatch"
    if not path.is_file():
        raise ConfigError(
            f"job.template={wanted}: {SHIPPED} is not installed here; give the path of a template of your own"
        )
    return path


def _lines(path: Path) -> list[str]:
    """The template's lines; ConfigError says what makes it none."""
    try:
        lines = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"template {path} is not UTF-8 text") from None
    marks = [number for number, line in enumerate(lines, 1) if line.startswith(MARK)]
    late = [n for n, line in enumerate(lines, 1) if line.startswith("#SBATCH") and marks and n > marks[0]]
    wrong = []
    if not lines[0].startswith("#!"):
        wrong.append('its first line must be "#!/bin/bash"')
    if len(marks) != 1:
        wrong.append(
            f'it has {len(marks)} lines that begin with "{MARK}"; one must, where the set-up and arguments of the job go'
        )
    if late:
        wrong.append(f"#SBATCH in line {late[0]} comes after the set-up, where Slurm does not see it")
    if '"$@"' not in "\n".join(lines):
        wrong.append('it does not use "$@", the arguments of hpclm.train')
    if any("\r" in line for line in lines):
        wrong.append("its lines end as on Windows; make them end in a newline alone")
    if wrong:
        raise ConfigError([f"template {path}: {problem}" for problem in wrong])
    return lines[:-1] if lines[-1] == "" else lines


def _filled(lines: list[str], asked: Options, body: list[str]) -> Iterator[str]:
    """The template's lines with the job's options after the last #SBATCH line, and its set-up at the mark."""
    mark = next(number for number, line in enumerate(lines) if line.startswith(MARK))
    last = max((number for number, line in enumerate(lines) if line.startswith("#SBATCH")), default=mark - 1)
    asked = dict(asked)
    for number, line in enumerate(lines):
        found = _DIRECTIVE.match(line)
        if number == mark:
            yield f"{MARK} by hpclm submit"
            yield from body
        elif not (found and found[1] in asked):
            yield line
        elif found[1] == "signal" and asked["signal"] and (found[2] or "").strip("\"'").startswith("B:"):
            asked["signal"] = f"B:{asked['signal']}"  # for the script, which hands it on
        if number == last:
            yield from (directive(option, value) for option, value in asked.items() if value is not None)


def check(text: str, source: Path) -> None:
    """ConfigError unless bash can read the script ``text``, made from the template ``source``."""
    try:
        done = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, timeout=30)
    except OSError as error:
        raise ConfigError(f"bash cannot be started: {error.strerror}") from None
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode or said:  # a here-document without an end is only warned of, and would swallow the rest
        raise ConfigError(f"bash cannot read the script made from {source} and job.setup: {said}")
