"""Start Python processes that import only what PYTHONPATH or an install names, never what lies in the current folder.

``python -m`` and ``python -c`` look in the current folder first, even for the standard library. Python 3.11 has the option -P
against that; ``CODE`` does the same in every version.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from hpclm import shipped

WITHOUT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
"""The first statement of ``python -c``, which has put "", the current folder, first in sys.path."""
CODE = f'{WITHOUT_FOLDER}; import runpy; runpy.run_module(sys.argv.pop(1), None, "__main__", True)'
"""Runs the module that is its first argument, as ``python -m`` does. The job templates have it too."""


def command(module: str, *words: str) -> tuple[str, ...]:
    """The command that runs ``module`` with the arguments ``words``."""
    return (sys.executable, "-u", "-c", CODE, module, *words)


def readable(words: Sequence[str]) -> list[str]:
    """A command line of ``command`` as ``python -m`` would have it, for people."""
    if CODE not in words:
        return [*words]
    place = words.index(CODE)
    return [*words[: place - 1], "-m", *words[place + 1 :]]


def env(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``base``, in which Python finds this copy of hpclm first unless that is installed, and libraries start Python safely too."""
    folders = [] if shipped.installed() else [str(shipped.PACKAGE.parent)]
    folders += [each for each in base.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", *folders)]
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    return {**base, **path, "PYTHONSAFEPATH": "1"}
