"""The script of a job: a template of slurm/ with the job's options and set-up.

A template also works by hand. Its #SBATCH lines are defaults that the job's options replace, and the job's set-up and
arguments replace the line that begins with ``# SET-UP``; nothing else changes.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpclm import files, shipped
from hpclm.config import JobConfig, RunConfig
from hpclm.config.job import TEMPLATES
from hpclm.errors import ConfigError
from hpclm.launch import setup
from hpclm.launch.options import Options, directive, options
from hpclm.node import processes

MARK = "# SET-UP"
LARGEST = 1 << 20  # bytes of a template
_DIRECTIVE = re.compile(r"#SBATCH\s+--([A-Za-z-]+)(?:[=\s]+(.*))?")


def render(config: RunConfig, path: Path, folders: Iterable[Path] = ()) -> str:
    """The script of the job that trains with the settings at ``path``, OUT/config.yaml; ConfigError if bash cannot
    parse it.

    ``folders``: of the data, to mount in a container.
    """
    source = template(config.job)
    asked = options(config, path.parent)
    body = [*setup.lines(config, path, folders)]
    text = "\n".join(_filled(_lines(source), asked, body)) + "\n"
    check(text, source)
    return text


def template(job: JobConfig) -> Path:
    """The path of the template that ``job`` names."""
    wanted = "container" if job.container and job.template == "srun" else job.template
    if job.restarts and wanted in TEMPLATES and wanted != "torchrun":
        raise ConfigError(f"job.restarts={job.restarts} needs job.template=torchrun, not {wanted}")
    if wanted not in TEMPLATES:
        return files.readable(Path(wanted), "job.template")
    templates = shipped.folder("slurm")
    path = templates / f"{wanted}.sbatch"
    if not path.is_file():
        raise ConfigError(
            f"job.template={wanted}: {templates} is not installed here; give the path of a template of your own"
        )
    return path


def _lines(path: Path) -> list[str]:
    """The template's lines; ConfigError if it is not a valid template."""
    try:
        lines = files.read_text(path, LARGEST).split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"template {path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"template {path} cannot be read: {error.strerror}") from None
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
    if any(re.match(r"#SBATCH\s+(hetjob|packjob)\b", line) for line in lines):
        wrong.append("it asks for a heterogeneous job (#SBATCH hetjob), of which a run would use one component only")
    if any("\r" in line for line in lines):
        wrong.append("it has Windows line endings; convert them to newlines")
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
            asked["signal"] = f"B:{asked['signal']}"  # to the script, which forwards it
        if number == last:
            yield from (directive(option, value) for option, value in asked.items() if value is not None)


def check(text: str, source: Path) -> None:
    """ConfigError unless bash can parse the script ``text``, made from the template ``source``."""
    code, _, errors = processes.ask(["bash", "-n"], 30.0, text=text)
    if code or errors.strip():  # an unterminated here-document is only a warning, and would swallow the rest
        raise ConfigError(f"bash cannot read the script made from {source} and job.setup: {errors.strip()}")
