"""The set-up in a job's script, before the processes start: modules, Python, variables, arguments."""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpclm import paths, shipped
from hpclm.config import JobConfig, RunConfig
from hpclm.config.job import TEMPLATES
from hpclm.errors import ConfigError
from hpclm.node import environment, python, shadows
from hpclm.rundir import code

# Variables of launchers and libraries that are passed to docker, which passes none by itself.
HIDDEN = (
    '[ -n "${PYTHONNOUSERSITE+set}" ] || { lacking=$(PYTHONNOUSERSITE=1 "${python:-python}" -c "$sees" '
    f"hpclm {' '.join(shadows.REQUIRED)} "
    '"${needs[@]}" 2> /dev/null) && export PYTHONNOUSERSITE=1; } || '
    '[ -z "$lacking" ] || '
    """echo "the environment has no $lacking: packages of the user's site are used, which come before its own" >&2"""
)
"""A line of shell that hides the user's site, unless the user chose or Python finds what the run needs only there. The templates have
it, too."""
HIDDEN_IN_IMAGE = (
    '[ -n "${PYTHONNOUSERSITE+set}" ] || { compgen -G '
    '"${PYTHONUSERBASE:-$HOME/.local}/lib/python*/site-packages/hpclm-*.dist-info" > /dev/null && '
    """echo "hpclm is installed in ~/.local, so packages there come before the image's" >&2; } || export PYTHONNOUSERSITE=1"""
)
"""Hides the user's site in a container, which may have this machine's home directory."""
_HANDED_ON = r"^(SLURM|PMI|PMIX|NCCL|GLOO|UCX|OMP|MKL|CUDA|TORCH|HF|WANDB|HPCLM)_"


def lines(config: RunConfig, path: Path, folders: Iterable[Path] = ()) -> Iterator[str]:
    """Lines of shell that prepare the processes, which train with the settings at ``path``.

    ``folders``: to mount in a container, besides job.mounts.
    """
    job = config.job
    if job.modules:
        yield "command -v module > /dev/null || . /etc/profile"
        yield f"module load {shlex.join(job.modules)} || exit 64"
    yield from _python(job)
    for variable, value in job.env.items():
        yield f"export {variable}={shlex.quote(value)}"
    if job.restarts:
        yield f"restarts={job.restarts}"
    if job.template == "mpirun":
        yield f"pass=({' '.join(f'-x {variable}' for variable in job.env)})"
    yield from job.setup
    if job.snapshot:
        folder = shlex.quote(str(code.folder(path.parent, code.sources(config.modules()))))
        yield f"export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}} {environment.SNAPSHOT}={folder}"
    yield "export PYTHONSAFEPATH=1"  # for what libraries start, and a user's own template
    if job.container:
        yield from [HIDDEN_IN_IMAGE] * (job.template not in TEMPLATES)
    else:
        needs = config.libraries()
        yield from [f"needs=({' '.join(needs)})"] * bool(needs)
        yield from [f"sees='{python.SEES}'", HIDDEN] * (job.template not in TEMPLATES)
    if job.container:
        yield f"inside=({_container(config, path, list(folders))})"
    yield f"set -- {shlex.quote(paths.literal(path))}"


def _python(job: JobConfig) -> Iterator[str]:
    """Lines that select the Python: of the container, of the environment, or the one running now."""
    if job.venv:
        yield f". {shlex.quote(str(Path(job.venv).absolute() / 'bin' / 'activate'))} || exit 64"
    elif job.conda:
        yield 'eval "$(conda shell.bash hook)" || exit 64'
        yield f"conda activate {shlex.quote(job.conda)} || exit 64"
    if _other_python(job):
        yield "python=python"
    else:
        yield f"python={shlex.quote(sys.executable or 'python3')}"
        if sys.prefix != sys.base_prefix:  # its mpirun fits its mpi4py
            yield f'export PATH={shlex.quote(str(Path(sys.prefix) / "bin"))}:"$PATH"'
    if _runs_clone(job):
        yield f"export PYTHONPATH={shlex.quote(str(shipped.PACKAGE.parent))}${{PYTHONPATH:+:$PYTHONPATH}}"


def _other_python(job: JobConfig) -> bool:
    return bool(job.venv or job.conda or job.container)


def _runs_clone(job: JobConfig) -> bool:
    """Whether the job runs the code of the clone that this process runs: another Python has its own, unless the current folder is
    the clone."""
    clone = shipped.PACKAGE.parent
    return not shipped.installed() and (not _other_python(job) or Path.cwd() == clone.resolve())


def _container(config: RunConfig, path: Path, folders: list[Path]) -> str:
    """The words that start a command in the container."""
    job, here, image = config.job, Path.cwd(), config.job.container or ""
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in job.mounts]
    for folder in dict.fromkeys([here, path.parent, *folders]):
        if set(str(folder)) & set(":,"):
            raise ConfigError(f"{folder} cannot be mounted in a container: its name has a colon or a comma")
        mounts.append(f"{folder}:{folder}")
    gpus = config.engine.device != "cpu"
    if job.runtime == "apptainer":
        words = ["apptainer", "exec", *["--nv"] * gpus, "--pwd", str(here)]
        return shlex.join([*words, *(word for mount in mounts for word in ("--bind", mount)), image])
    if job.runtime == "pyxis":
        words = [f"--container-image={image}", f"--container-mounts={','.join(mounts)}", f"--container-workdir={here}"]
        return shlex.join([*words, f"--container-env={','.join(dict.fromkeys([*job.env, python.USER_SITE]))}"])
    words = [
        *["--rm", "--init", "--network=host", "--ipc=host"],
        "--entrypoint=",  # an image's entry point would take the command as its arguments
        "--env=HOME=/tmp",  # of a user whom the image does not know it is /, which only root can write
        f"--user={os.getuid()}:{os.getgid()}",
        f"--workdir={here}",
    ]
    words += [f"--volume={mount}" for mount in mounts] + ["--gpus=all"] * gpus
    words += ["--env=PYTHONPATH"] * (job.snapshot or _runs_clone(job)) + [f"--env={python.USER_SITE}"]
    words += [f"--env={variable}" for variable in job.env if variable != python.USER_SITE] + [image]
    start = f"""exec docker run $(compgen -e | grep -E '{_HANDED_ON}' | sed s/^/--env=/) "$@\""""
    return shlex.join(["bash", "-c", start, "docker", *words])
