"""Start Python processes that import from PYTHONPATH and installed packages only, never from the current folder."""

import json
import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpclm.base import shipped
from hpclm.node import processes, slurm
from hpclm.node.processes import NoAnswerError

LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "MPI_", slurm.STEPS)
"""Prefixes of variables that tell a library that a launcher started this rank."""
SAFE_PATH = "PYTHONSAFEPATH"
"""Variable that keeps the current folder out of Python's search path, like Python's option -P."""
USER_SITE = "PYTHONNOUSERSITE"
"""Variable that hides the packages of ``pip install --user`` from Python, unless it is empty."""


def command(module: str, *words: str) -> tuple[str, ...]:
    """The command that runs ``module`` with the arguments ``words``."""
    return (sys.executable, "-P", "-u", "-m", module, *words)


def safe_env(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment ``base``, made safe for processes that hpclm and its libraries start.

    Python finds this copy of hpclm first, unless hpclm is installed. The user's site, which would come before the environment's
    packages, is hidden unless ``base`` has PYTHONNOUSERSITE or hpclm itself is installed there.
    """
    folders = base.get("PYTHONPATH", "").split(os.pathsep)
    if not shipped.installed():
        folders.insert(0, str(shipped.PACKAGE.parent))
    folders = [folder for folder in dict.fromkeys(folders) if folder]
    env = {**base, SAFE_PATH: "1"}
    if folders:  # passed to another host, an empty variable would replace that host's own
        env["PYTHONPATH"] = os.pathsep.join(folders)
    if USER_SITE not in env and not any(Path(site.getusersitepackages()).glob("hpclm-*.dist-info")):
        env[USER_SITE] = "1"
    return env


def ask(code: str, env: Mapping[str, str], seconds: float = 30) -> dict[str, Any]:
    """Run ``code`` with this interpreter, without the launcher's variables; returns the JSON that it prints, or {"error": reason}."""
    kept = {name: value for name, value in env.items() if not name.startswith(LAUNCHERS)}
    clean = safe_env({USER_SITE: "", **kept})  # so that it finds the same packages as this process
    try:
        status, output, errors = processes.ask([sys.executable, "-P", "-c", code], seconds, clean)
    except NoAnswerError as error:
        return {"error": str(error)}
    if status:
        lines = errors.strip().splitlines()
        if not lines:
            lines = [f"ended by signal {-status}" if status < 0 else f"exit code {status}"]
        return {"error": lines[-1]}
    try:
        return dict(json.loads(output.splitlines()[-1]))
    except (ValueError, IndexError):
        return {"error": "no answer"}
