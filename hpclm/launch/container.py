"""Start a command in a job's container. The supervisor runs outside it, because images have neither srun nor scontrol."""

import os
from collections.abc import Mapping
from pathlib import Path

from hpclm.base import shipped
from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig
from hpclm.node import python

HANDED_ON = r"^((SLURM|PMI|PMIX|NCCL|GLOO|UCX|OMP|MKL|CUDA|TORCH|HF|WANDB|HPCLM)_|PYTHON(SAFEPATH|NOUSERSITE)$)"
"""Variables to pass to a container of docker, which passes no variables by itself."""
PYTHON = "python"
"""The interpreter of an image."""


def words(config: RunConfig) -> list[str]:
    """The words before a command that runs in the job's container; empty without a container.

    ConfigError if a folder that it needs cannot be mounted.
    """
    job = config.job
    if not job.container:
        return []
    here = Path.cwd()
    mounts = _mounts(config, here)
    gpus = config.engine.device != "cpu"
    if job.runtime == "apptainer":
        start = ["apptainer", "exec"]
        if gpus:
            start.append("--nv")
        binds = [word for mount in mounts for word in ("--bind", mount)]
        return [*start, "--pwd", str(here), *binds, job.container]
    if job.runtime == "pyxis":
        variables = ",".join(dict.fromkeys([*job.env, python.USER_SITE]))
        paths = [f"--container-mounts={','.join(mounts)}", f"--container-workdir={here}"]
        return [f"--container-image={job.container}", *paths, f"--container-env={variables}"]
    return _docker(config, here, mounts, gpus)


def environment_of_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of ranks in a container, from this process's ``env``.

    They run the image's hpclm, or the clone's code if this process runs in a clone's folder.
    """
    clone = shipped.PACKAGE.parent
    folders = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", str(clone))]
    if _runs_clone():
        folders.insert(0, str(clone))
    ranks = {**env, python.SAFE_PATH: "1", "PYTHONPATH": os.pathsep.join(folders)}
    home = Path(env.get("PYTHONUSERBASE") or Path(env.get("HOME") or "/nonexistent") / ".local")
    if not any(home.glob("lib/python*/site-packages/hpclm-*.dist-info")):  # the image may see this machine's home
        ranks.setdefault(python.USER_SITE, "1")
    return {name: value for name, value in ranks.items() if value or name != "PYTHONPATH"}


def _runs_clone() -> bool:
    return not shipped.installed() and Path.cwd() == shipped.PACKAGE.parent.resolve()


def _mounts(config: RunConfig, here: Path) -> list[str]:
    data = [*config.data.prefixes(), *config.data.tokenizer_files]
    folders = [here, Path(config.out).absolute(), *(Path(file).absolute().parent for file in data)]
    for folder in folders:
        if set(str(folder)) & set(":,"):
            raise ConfigError(f"{folder} cannot be mounted in a container: its name has a colon or a comma")
    chosen = [mount if ":" in mount else f"{mount}:{mount}" for mount in config.job.mounts]
    return [*chosen, *(f"{folder}:{folder}" for folder in dict.fromkeys(folders))]


def _docker(config: RunConfig, here: Path, mounts: list[str], gpus: bool) -> list[str]:
    options = [
        *["--rm", "--init", "--network=host", "--ipc=host"],
        "--entrypoint=",  # an image's entry point would take the command as its arguments
        "--env=HOME=/tmp",  # for users whom the image does not know, it would be /, which only root can write
        f"--user={os.getuid()}:{os.getgid()}",
        f"--workdir={here}",
        *(f"--volume={mount}" for mount in mounts),
    ]
    if gpus:
        options.append("--gpus=all")
    if _runs_clone():
        options.append("--env=PYTHONPATH")
    options += [f"--env={variable}" for variable in config.job.env]
    # the variables differ from task to task, so the shell of each task lists them
    start = f"""exec docker run $(compgen -e | grep -E '{HANDED_ON}' | sed s/^/--env=/) "$@\""""
    return ["bash", "-c", start, "docker", *options, str(config.job.container)]
