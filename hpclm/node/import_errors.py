"""Explain in one line why an import fails: a library is missing, is not from the environment, or loads a wrong shared library.

It runs when imports fail, so it imports little besides Python's standard library.
"""

import os
import re
import site
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import TracebackType

from hpclm.base.errors import ExitCode

REQUIRED = (
    *("torch", "numpy", "omegaconf", "yaml", "submitit", "orjson", "psutil", "tokenizers", "xxhash", "tensorboard"),
    *("tqdm", "wcwidth"),
)
"""The libraries that hpclm needs (setup.cfg), by their names in import statements."""
WAY_OUT = "take its folder out of PYTHONPATH, or set PYTHONNOUSERSITE=1 if it is in ~/.local"
LINKING = ("LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables that make the dynamic linker replace a Python package's shared libraries."""


def explained(error: BaseException) -> str | None:
    """One line about the installation's fault that caused ``error``; None if ``error`` has another cause."""
    if not isinstance(error, Exception):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = ": ".join([type(error).__name__, " ".join(lines[:2])])
    for name, path in outside(_suspects(error)).items():
        return f"{name} comes from {path}, outside the environment, and does not work here: {reason}; {WAY_OUT}"
    importer = _importer(error)
    if isinstance(error, ModuleNotFoundError) and importer in ("hpclm", *REQUIRED):
        hidden = "; PYTHONNOUSERSITE hides ~/.local" if os.environ.get("PYTHONNOUSERSITE") else ""
        return (
            f"{importer} needs {error.name}, which {sys.executable} does not have: activate the environment that hpclm is "
            f"installed in, or pip install hpclm into this one{hidden}"
        )
    linking = [f"{name}={os.environ[name]}" for name in LINKING if os.environ.get(name)]
    by_linker = isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno is None)
    about = [line for line in lines if re.search(r"\.so\b", line)]
    if by_linker and about and linking:
        return f"{type(error).__name__}: {about[0]}; perhaps because of {' and '.join(linking)}"
    return None


def outside(names: Iterable[str]) -> dict[str, str]:
    """The libraries among ``names`` that Python finds outside its environment, with their files.

    A module that is not in the environment and that hpclm does not need is the user's own, and is left out.
    """
    library = Path(os.__file__).parent
    environment = [library, library / "lib-dynload", *map(Path, site.getsitepackages())]
    folders = {folder.resolve() for folder in environment}
    found = {}
    for name in names:
        spec = PathFinder.find_spec(name)
        if spec is None or spec.origin is None or name == "hpclm" or _folder(spec).resolve() in folders:
            continue
        if name in REQUIRED or PathFinder.find_spec(name, [*map(str, environment)]):
            found[name] = spec.origin
    return found


def report_uncaught() -> None:
    """From now on, explain an uncaught exception if possible, such as one during the import of hpclm itself."""
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        os.write(2, b"interrupted\n")
        os._exit(ExitCode.INTERRUPTED)
    reason = None
    with suppress(Exception):  # the modules used here may themselves come from outside
        reason = explained(error)
    with suppress(Exception):
        from hpclm.node import ends

        if reason:
            ends.note(ExitCode.INVALID, reason)
        else:
            ends.note(ExitCode.FAILED, f"{kind.__name__}: {error}")
    if reason is None:
        sys.__excepthook__(kind, error, trace)
        return
    os.write(2, f"error: {reason}\n".encode(errors="backslashreplace"))
    os._exit(ExitCode.INVALID)


def _suspects(error: Exception) -> list[str]:
    """Modules that may be the cause of ``error``, the most likely first: those in its text, and those being imported."""
    text = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>":
            text += f"{frame.f_code.co_filename}\n"
    if isinstance(error, SyntaxError):
        text += f"{error.filename}\n"
    elif isinstance(error, ImportError | AttributeError):
        text += str(error)
    words = re.findall(r"(?<=['/])\w+(?=['./])", text)
    return list(dict.fromkeys(reversed(words)))


def _importer(error: Exception) -> str:
    """The top-level module of the statement that raised ``error``; empty if unknown."""
    importer = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name != "importlib":
            importer = name
    return importer


def _folder(spec: ModuleSpec) -> Path:
    """The folder of Python's search path that a module comes from."""
    path = Path(spec.origin or "")
    return path.parent.parent if spec.submodule_search_locations else path.parent
