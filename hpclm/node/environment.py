"""The environment of this process: variables for its children, and the user's files that variables name."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm.base import folders, paths
from hpclm.base.errors import ConfigError
from hpclm.node import parent, python, slurm

if TYPE_CHECKING:
    from hpclm.config import RunConfig

SNAPSHOT = "HPCLM_SNAPSHOT"
"""Variable with the snapshot of the code that a job runs."""
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Variable with torch.compile's folder for compiled code."""
INDUCTOR_FOLDER = "hpclm-inductor"
"""Prefix of the name of hpclm's folder for compiled code."""
LAUNCH = ("HPCLM_LAUNCHER", "HPCLM_ERRORS", parent.PID)
"""Variables that hpclm sets for its ranks. A launch inside another launch must not inherit them."""
NOWHERE = "/proc/self"
"""An existing folder that nobody can write to."""

# mpirun and torchrun set these variables for the processes that they start.
TORCHRUN = re.compile(r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(GROUP|ROLE)_NAME|MASTER_(ADDR|PORT)")
MPI = re.compile(r"(OMPI|PMIX|PMI|PRTE|ORTE|HYDRA|HYDI|MPI)_\w+|MPIR_\w+")
COMPUTING = ("TORCH", "PYTORCH", "TRITON", "NVIDIA_", "CUBLAS", "CUDNN", "NCCL_", "MKL_", "DNNL_")
"""Prefixes of variables that may change what PyTorch, its compiler and the vendors' libraries compute."""


def inherited(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for processes that hpclm starts (``python.safe_env``), without variables of an outer launch."""
    return python.safe_env({k: v for k, v in env.items() if k not in LAUNCH and not TORCHRUN.fullmatch(k)})


def replace(env: Mapping[str, str]) -> None:
    """Make ``env`` the environment of this process and of its children."""
    forget(os.environ.keys() - env.keys())
    os.environ.update(env)


def forget(names: Iterable[str]) -> None:
    """Remove variables from the environment of this process and of its children."""
    for name in names:
        os.environ.pop(name, None)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the environment of this process after the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        if os.environ != before:
            replace(before)


def snapshot(env: Mapping[str, str] = os.environ) -> Path | None:
    """The snapshot of the code that this process should run; None without one."""
    return Path(env[SNAPSHOT]) if env.get(SNAPSHOT) else None


def for_deepspeed(kind: str, index: int, builds: bool = False, env: MutableMapping[str, str] = os.environ) -> None:
    """Set the device that DeepSpeed uses in this process, number ``index`` of ``kind``; call it before DeepSpeed is imported.

    ``builds``: DeepSpeed will compile extensions. Each job then has its own folder for them on each node: a process that is
    killed during the build leaves a lock, and every later run would wait for it forever. HpclmError if the folder cannot be made.
    """
    env["DS_ACCELERATOR"] = kind
    env["LOCAL_RANK"] = str(index)
    if "OMPI_COMM_WORLD_LOCAL_RANK" in env:  # DeepSpeed compares it with LOCAL_RANK
        env["OMPI_COMM_WORLD_LOCAL_RANK"] = str(index)
    start = slurm.start_of_job(env)
    if builds and start and "TORCH_EXTENSIONS_DIR" not in env:
        try:
            env["TORCH_EXTENSIONS_DIR"] = str(folders.own_temporary(f"hpclm-extensions-{start}"))
        except OSError as error:
            raise folders.no_temporary(error) from None


def for_inductor(env: MutableMapping[str, str] = os.environ) -> None:
    """Set torch.compile's folder for compiled code on this node, unless the user chose one.

    PyTorch's default, which importing torch._dynamo sets, may be another user's folder. The variable may also name hpclm's folder on
    another machine. Precompiled headers for C++ are switched off, because PyTorch always keeps them in its default folder.

    OSError or ConfigError if the folder cannot be made, or others could replace it. Then nothing can be compiled, but
    torch._dynamo can be imported, because the folder in the variable exists.
    """
    env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    folder = Path(env.get(INDUCTOR_CACHE) or NOWHERE)
    if folder.name.startswith(INDUCTOR_FOLDER) and folders.is_private_folder(folder):
        return
    if folder == Path(NOWHERE) or folder.name.startswith(("torchinductor_", INDUCTOR_FOLDER)):
        env[INDUCTOR_CACHE] = NOWHERE
        env[INDUCTOR_CACHE] = str(folders.own_temporary(INDUCTOR_FOLDER))


def for_code_that_may_compile(env: MutableMapping[str, str] = os.environ) -> None:
    """``for_inductor`` for the user's own code and for libraries: without a safe folder, only compiling fails."""
    with suppress(ConfigError, OSError):
        for_inductor(env)


def of_a_job(options: Iterable[str], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for sbatch, which passes it on to the job. ``options``: the options that the job sets itself.

    It lacks variables that override a script's options, and variables of a launch around this process. It has the variables with
    which Slurm's commands find a cluster and log in to it.
    """
    in_mpi = "OMPI_COMM_WORLD_RANK" in env or "PMIX_RANK" in env or "PMI_RANK" in env
    kept = {"HPCLM_SITE"} | slurm.kept_for_sbatch(options, env)
    if not in_mpi:  # outside an MPI launch, the user has set OMPI_MCA_* and the like
        kept |= {name for name in env if MPI.fullmatch(name) and not name.startswith("PMI_")}
    launchers = (slurm.VARIABLES, MPI, TORCHRUN)
    removed = {name for name in env if name.startswith("HPCLM_") or any(each.fullmatch(name) for each in launchers)}
    return {name: value for name, value in env.items() if name in kept or name not in removed}


def settings_with_site(words: Sequence[str], typed: Sequence[str] = ()) -> "RunConfig":
    """The settings of ``[FILE] key=value ...`` on top of the site file. ``typed``: all arguments of the command, for messages."""
    from hpclm import config  # loads OmegaConf

    return config.from_cli(list(words), site_file(), typed)


def site_file(env: Mapping[str, str] = os.environ) -> Path | None:
    """The site file: $HPCLM_SITE, otherwise hpclm/site.yaml in $XDG_CONFIG_HOME or ~/.config. None without one, or if $HPCLM_SITE is "".

    The file that HPCLM_SITE names may be missing; reading it then fails.
    """
    named = env.get("HPCLM_SITE")
    if named == "":
        return None
    if named:
        return Path(paths.expanded(named))
    folder = Path(env.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():
        folder = Path(env.get("HOME") or "/nonexistent", ".config")
    usual = folder / "hpclm" / "site.yaml"
    return usual if usual.exists() else None


def user_cache(env: Mapping[str, str] = os.environ) -> Path:
    """The folder of this user's cache for hpclm, which may not exist."""
    return Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "/nonexistent", ".cache"), "hpclm")


def of_computing(env: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """The variables that may change what PyTorch and the libraries below it compute."""
    return sorted(
        (name, value)
        for name, value in env.items()
        if name.startswith(COMPUTING) and not name.endswith("_DIR") and not TORCHRUN.fullmatch(name)
    )
