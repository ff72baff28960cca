"""What stands in a job's script between its options and the processes: modules, Python, variables, arguments."""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpclm.config import JobConfig, RunConfig
from hpclm.errors import ConfigError

# Variables that docker, which hands none on, gets from the rank: what its launcher and libraries read.
_HANDED_ON = r"^(SLURM|PMI|PMIX|NCCL|GLOO|UCX|OMP|MKL|CUDA|TORCH|HF|WANDB|HPCLM)_"


def lines(config: RunConfig, path: Path, folders: Iterable[Path] = ()) -> Iterator[str]:
    """Shell that readies the processes which will train by the settings at ``path``.

    ``folders``: what a container must see, besides job.mounts.
    """
    job = config.job
    if job.modules:
        yield "command -v module > /dev/null || . /etc/profile"
        yield f"module load {shlex.join(job.modules)} || exit 64"
    yield from _python(job)
    for variable, value in job.env.items():
        yield f"export {variable}={shlex.quote(value)}"
    if job.template == "mpirun":
        yield f"pass=({' '.join(f'-x {variable}' for variable in job.env)})"
    yield from job.setup
    if job.container:
        yield f"inside=({_container(config, path, list(folders))})"
    yield f"set -- {shlex.quote(str(path))}"


def _python(job: JobConfig) -> Iterator[str]:
    """Lines that choose the Python: the container's, the environment's, or the one that is running now."""
    if job.venv:
        yield f". {shlex.quote(str(Path(job.venv).expanduser().absolute() / 'bin' / 'activate'))} || exit 64"
    elif job.conda:
        yield 'eval "$(conda shell.bash hook)" || exit 64'
        yield f"conda activate {shlex.quote(job.conda)} || exit 64"
    if job.venv or job.conda or job.container:
        yield "python=python"
        return
    yield f"python={shlex.quote(sys.executable or 'python3')}"
    if sys.prefix != sys.base_prefix:  # its mpirun is the one that its mpi4py is made for
        yield f'export PATH={shlex.quote(str(Path(sys.prefix) / "bin"))}:"$PATH"'
    root = Path(__file__).parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        yield f"export PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}}"


def _container(config: RunConfig, path: Path, folders: list[Path]) -> str:
    """Words that start a command in the container."""
    job, here, image = config.job, Path.cwd(), config.job.container or ""
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in job.mounts]
    for folder in dict.fromkeys([here, path.parent, *folders]):
        if set(str(folder)) & set(":,"):
            raise ConfigError(f"{folder} cannot be seen in a container: its name has a colon or a comma")
        mounts.append(f"{folder}:{folder}")
    gpus = config.engine.device != "cpu"
    if job.runtime == "apptainer":
        words = ["apptainer", "exec", *["--nv"] * gpus, "--pwd", str(here)]
        return shlex.join([*words, *(word for mount in mounts for word in ("--bind", mount)), image])
    if job.runtime == "pyxis":
        words = [f"--container-image={image}", f"--container-mounts={','.join(mounts)}", f"--container-workdir={here}"]
        return shlex.join(words + [f"--container-env={','.join(job.env)}"] * bool(job.env))
    words = [
        "--rm",
        "--init",
        "--network=host",
        "--ipc=host",
        f"--user={os.getuid()}:{os.getgid()}",
        f"--workdir={here}",
    ]
    words += [f"--volume={mount}" for mount in mounts] + ["--gpus=all"] * gpus
    words += [f"--env={variable}" for variable in job.env] + [image]
    start = f"""exec docker run $(compgen -e | grep -E '{_HANDED_ON}' | sed s/^/--env=/) "$@\""""
    return shlex.join(["bash", "-c", start, "docker", *words])
