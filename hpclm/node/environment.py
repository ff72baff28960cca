"""The environment of this process: what it passes on to what it starts, and the user's own files that it names."""

import getpass
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm import folders, paths
from hpclm.errors import ConfigError
from hpclm.node import parent, python, slurm

if TYPE_CHECKING:
    from hpclm.config import RunConfig

SNAPSHOT = "HPCLM_SNAPSHOT"
"""The snapshot of the code that a job runs."""
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch.compile keeps what it has compiled."""
INDUCTOR_FOLDER = "hpclm-inductor"
"""How the name of hpclm's folder for that begins."""
PRECOMPILED_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
"""Whether PyTorch precompiles headers for C++: 1 or 0."""
LAUNCH = ("HPCLM_LAUNCHER", "HPCLM_ERRORS", parent.PID)
"""Set by hpclm for its ranks; a launch inside another must not inherit them."""
NOWHERE = "/proc/self"
"""An existing folder that nobody can write to."""

# Set by mpirun and by torchrun for the processes that they start.
TORCHRUN = re.compile(r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(GROUP|ROLE)_NAME|MASTER_(ADDR|PORT)")
MPI = re.compile(r"(OMPI|PMIX|PMI|PRTE|ORTE|HYDRA|HYDI|MPI)_\w+|MPIR_\w+")
COMPUTING = ("TORCH", "PYTORCH", "TRITON", "NVIDIA_", "CUBLAS", "CUDNN", "NCCL_", "MKL_", "DNNL_")
"""How variables begin by which PyTorch, its compiler and the vendors' libraries may compute otherwise."""


def inherited(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of what hpclm starts (``python.safe_env``), without the variables of an outer launch by hpclm or torchrun."""
    return python.safe_env({k: v for k, v in env.items() if k not in LAUNCH and not TORCHRUN.fullmatch(k)})


def replace(env: Mapping[str, str]) -> None:
    """Make ``env`` the environment of this process and of its children."""
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)


def forget(names: Iterable[str]) -> None:
    """Remove variables from the environment of this process and of its children."""
    for name in names:
        os.environ.pop(name, None)


@contextmanager
def preserved() -> Iterator[None]:
    """After the block, the environment of this process is as before it."""
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

    ``builds``: DeepSpeed will compile extensions. A job then does so in a separate folder on each node: a process that is
    killed during the build leaves a lock behind, and every later run would wait for it forever. HpclmError if it cannot be made.
    """
    env["DS_ACCELERATOR"] = kind
    env["LOCAL_RANK"] = str(index)
    if "OMPI_COMM_WORLD_LOCAL_RANK" in env:  # must equal LOCAL_RANK; it does not if each task sees only one GPU
        env["OMPI_COMM_WORLD_LOCAL_RANK"] = str(index)
    if builds and "TORCH_EXTENSIONS_DIR" not in env and (start := slurm.start_of_job(env)):
        try:
            env["TORCH_EXTENSIONS_DIR"] = str(folders.own_temporary(f"hpclm-extensions-{start}"))
        except OSError as error:
            raise folders.no_temporary(error) from None


def for_inductor(env: MutableMapping[str, str] = os.environ) -> None:
    """Set where torch.compile keeps what it has compiled on this node, unless the user chose a folder.

    PyTorch's own default, which it also writes into ``env`` when torch._dynamo is imported, may be another user's folder. What
    hpclm set is used only if this machine has it: a job inherits the variables of the machine that submitted it.
    Headers for C++, which PyTorch keeps in its default folder whatever was chosen, are precompiled if that folder is this user's
    alone and the user does not forbid it.

    OSError or ConfigError if the folder cannot be made, or others could replace it. Then nothing can be compiled, but torch._dynamo
    can be imported, which makes the folder that the variable names.
    """
    if env.get(PRECOMPILED_HEADERS) != "0":
        env[PRECOMPILED_HEADERS] = str(int(_default_of_inductor_is_private()))
    folder = Path(env.get(INDUCTOR_CACHE) or NOWHERE)
    hpclm_made = folder.name.startswith(INDUCTOR_FOLDER)
    if not hpclm_made and folder != Path(NOWHERE) and folder.name != _default_of_inductor():
        return
    if not hpclm_made or not folders.is_private_folder(folder):
        env[INDUCTOR_CACHE] = NOWHERE
        env[INDUCTOR_CACHE] = str(folders.own_temporary(INDUCTOR_FOLDER))


def precompiles_headers(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torch.compile precompiles headers for C++, as ``for_inductor`` has decided."""
    return env.get(PRECOMPILED_HEADERS) == "1"


def for_code_that_may_compile(env: MutableMapping[str, str] = os.environ) -> None:
    """``for_inductor`` for a user's own code and for libraries, which may call torch.compile or not: without a safe folder the
    variable stays as it is."""
    before = env.get(INDUCTOR_CACHE)
    try:
        for_inductor(env)
    except (ConfigError, OSError):
        env.pop(INDUCTOR_CACHE, None)
        env.update({} if before is None else {INDUCTOR_CACHE: before})


def _default_of_inductor() -> str:
    """The name of the folder that PyTorch chooses for what it has compiled."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # no variable names the user, nor does the password database
        user = f"uid_{os.getuid()}"
    return "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)


def _default_of_inductor_is_private() -> bool:
    """Whether nobody else can write to PyTorch's default folder for compiled code. Creates the folder if it is missing."""
    folder = Path(tempfile.gettempdir(), _default_of_inductor())
    with suppress(OSError):
        if not folders.exposed_folder(folder.parent, sticky=True):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folders.is_private_folder(folder):
                folder.chmod(0o700)  # nobody else reaches what is in it, whatever its mode
                return True
    return False


def to_unset(options: Iterable[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that sbatch must not see; ``options``: those that the job sets itself.

    Some override a script's options, and sbatch passes all others on to the job. Those by which Slurm's other commands find a cluster
    and log in to it are sbatch's too.
    """
    in_mpi = "OMPI_COMM_WORLD_RANK" in env or "PMIX_RANK" in env or "PMI_RANK" in env
    kept = {"HPCLM_SITE"} | slurm.kept_for_sbatch(options, env)
    if not in_mpi:  # OMPI_MCA_* and the like were then set by the user
        kept |= {name for name in env if MPI.fullmatch(name) and not name.startswith("PMI_")}
    candidates = (
        name
        for name in env
        if name.startswith("HPCLM_") or any(launcher.fullmatch(name) for launcher in (slurm.VARIABLES, MPI, TORCHRUN))
    )
    return sorted(name for name in candidates if name not in kept)


def of_a_job(options: Iterable[str], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which sbatch is called, without those variables."""
    unset = set(to_unset(options, env))
    return {name: value for name, value in env.items() if name not in unset}


def settings(words: Sequence[str], typed: Sequence[str] = ()) -> "RunConfig":
    """The settings of ``[FILE] key=value ...`` on top of the site file; ``typed``: all arguments of the verb, for messages."""
    from hpclm import config  # loads OmegaConf

    return config.from_cli(list(words), site_file(), typed)


def site_file(env: Mapping[str, str] = os.environ) -> Path | None:
    """The site file, None without one: $HPCLM_SITE (empty: none), or hpclm/site.yaml in the user's ~/.config.

    $XDG_CONFIG_HOME replaces ~/.config if it is set. The file that HPCLM_SITE names may be missing; reading it then fails.
    """
    named = env.get("HPCLM_SITE")
    if named is not None:
        return Path(paths.expanded(named)) if named else None
    folder = env.get("XDG_CONFIG_HOME", "")
    home = Path(env.get("HOME") or "/nonexistent")
    usual = (Path(folder) if folder.startswith("/") else home / ".config") / "hpclm" / "site.yaml"
    return usual if usual.exists() else None


def user_cache(env: Mapping[str, str] = os.environ) -> Path:
    """The folder of what hpclm remembers for its user, which may not exist."""
    return Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "/nonexistent") / ".cache") / "hpclm"


def of_computing(env: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """The variables that may change what PyTorch and the libraries below it compute."""
    mine = {name: value for name, value in env.items() if name.startswith(COMPUTING) and not name.endswith("_DIR")}
    return sorted((name, value) for name, value in mine.items() if not TORCHRUN.fullmatch(name))
