"""Start Python processes that import only what PYTHONPATH or an install names, never what lies in the current folder.

``python -m`` and ``python -c`` look in the current folder first, even for the standard library. Python 3.11 has the option -P
against that; ``CODE`` does the same in every version.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpclm import shipped
from hpclm.node import processes, shadows, slurm
from hpclm.node.processes import NoAnswerError

LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "MPI_", slurm.STEPS)
"""Prefixes of variables by which a library takes a process for a launcher's rank."""

WITHOUT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
"""The first statement of ``python -c``, which has put "", the current folder, first in sys.path."""
CODE = f'{WITHOUT_FOLDER}; import runpy; runpy.run_module(sys.argv.pop(1), None, "__main__", True)'
"""Runs the module that is its first argument, as ``python -m`` does. The job templates have it too."""


SEES = (
    f"{WITHOUT_FOLDER}; from importlib.util import find_spec; "
    "missing = [name for name in sys.argv[1:] if not find_spec(name)]; print(*missing); sys.exit(bool(missing))"
)
"""Prints which of the modules that are its arguments Python does not find; 1 if there are any. The job templates have it too."""
USER_SITE = "PYTHONNOUSERSITE"
"""Variable that hides the packages of ``pip install --user`` from Python, unless it is empty."""


def command(module: str, *words: str) -> tuple[str, ...]:
    """The command that runs ``module`` with the arguments ``words``."""
    return (sys.executable, "-u", "-c", CODE, module, *words)


def readable(words: Sequence[str]) -> list[str]:
    """A command line of ``command`` as ``python -m`` would have it, for people; of a notebook's kernel, what it runs."""
    if any("kernel_launcher" in word for word in words):
        return ["hpclm.train", "in", "a", "notebook"]
    if CODE not in words:
        return [*words]
    place = words.index(CODE)
    return [*words[: place - 1], "-m", *words[place + 1 :]]


def safe_env(base: Mapping[str, str] = os.environ, needs: Sequence[str] = ()) -> dict[str, str]:
    """``base``, in which Python finds this copy of hpclm first unless that is installed, and libraries start Python safely too.

    Packages of the user's site are hidden, which come before the environment's, unless ``base`` has PYTHONNOUSERSITE, or hpclm or
    a module that it or the run ``needs`` is there only.
    """
    folders = [] if shipped.installed() else [str(shipped.PACKAGE.parent)]
    folders += [folder for folder in base.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", *folders)]
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    env = {**base, **path, "PYTHONSAFEPATH": "1"}
    if USER_SITE not in env and not _only_in_user_site(("hpclm", *shadows.REQUIRED, *needs), env):
        env[USER_SITE] = "1"
    return env


def _only_in_user_site(names: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Which of the modules ``names`` Python does not find with ``env`` once the user's site is hidden."""
    if shadows.user_site() not in sys.path:
        return []
    try:
        return processes.ask([sys.executable, "-c", SEES, *names], 60.0, {**env, USER_SITE: "1"})[1].split()
    except NoAnswerError:
        return []


@contextmanager
def safe_children() -> Iterator[None]:
    """Processes that libraries start in the block import nothing from the current folder (from Python 3.11 on)."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def ask(code: str, env: Mapping[str, str], seconds: float = 30) -> dict[str, Any]:
    """What ``code`` prints as JSON, run by this interpreter without the launcher's variables; {"error": reason} without an answer."""
    kept = {name: value for name, value in env.items() if not name.startswith(LAUNCHERS)}
    clean = safe_env({USER_SITE: "", **kept})  # it sees what this process sees
    code = f"{WITHOUT_FOLDER}\n{code}"
    try:
        status, output, errors = processes.ask([sys.executable, "-c", code], seconds, clean)
    except NoAnswerError as error:
        return {"error": str(error)}
    if status:
        exited = f"ended by signal {-status}" if status < 0 else f"exit code {status}"
        return {"error": (errors.strip().splitlines() or [exited])[-1]}
    try:
        return dict(json.loads(output.splitlines()[-1]))
    except (ValueError, IndexError):
        return {"error": "no answer"}
