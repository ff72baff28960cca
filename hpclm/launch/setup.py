"""The lines of a job's script before the supervisor: modules, the Python environment, variables."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from hpclm.base import paths, shipped
from hpclm.config import JobConfig, RunConfig
from hpclm.node import environment
from hpclm.rundir import code

TRAP = "trap '' TERM USR1 USR2"
"""Keeps signals from ending the set-up. The supervisor inherits this trap; later it handles signals itself and forwards them to the ranks."""
FAILED = '[ $? = 0 ] || { echo "the set-up of the job has failed" >&2; exit 64; }'
"""Ends the job if the last line before it has failed."""


def lines(config: RunConfig, path: Path) -> Iterator[str]:
    """Lines of shell that prepare a process which trains with the settings at ``path``."""
    job = config.job
    yield TRAP
    if job.modules:
        yield "command -v module > /dev/null || . /etc/profile"
        yield f"module load {shlex.join(job.modules)} || exit 64"
    if job.venv:
        yield f". {shlex.quote(str(Path(job.venv).absolute() / 'bin' / 'activate'))} || exit 64"
    elif job.conda:
        yield 'eval "$(conda shell.bash hook)" || exit 64'
        yield f"conda activate {shlex.quote(job.conda)} || exit 64"
    elif sys.prefix != sys.base_prefix:  # mpi4py needs the mpirun of this environment
        yield f'export PATH={shlex.quote(str(Path(sys.prefix) / "bin"))}:"$PATH"'
    if not shipped.installed() and (not _other_python(job) or Path.cwd() == shipped.PACKAGE.parent.resolve()):
        yield f"export PYTHONPATH={shlex.quote(str(shipped.PACKAGE.parent))}${{PYTHONPATH:+:$PYTHONPATH}}"
    for variable, value in job.env.items():
        yield f"export {variable}={shlex.quote(value)}"
    if job.setup:
        yield from job.setup
        yield FAILED
    if job.snapshot:
        folder = shlex.quote(str(code.folder(path.parent, code.sources(config.modules()))))
        yield f"export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}} {environment.SNAPSHOT}={folder}"


def supervisor(job: JobConfig, path: Path) -> list[str]:
    """The command that runs the job with the settings at ``path``, after its set-up."""
    return [interpreter(job), "-P", "-u", "-m", "hpclm.launch.job", paths.literal(path)]


def interpreter(job: JobConfig) -> str:
    """The Python of a job's script: that of the job's environment, otherwise the one that submits."""
    return "python" if _other_python(job) else sys.executable or "python3"


def _other_python(job: JobConfig) -> bool:
    return bool(job.venv or job.conda)
