"""Say in one line why an import fails: which library comes from outside the environment, or is missing."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType, TracebackType

from hpclm.errors import ExitCode
from hpclm.node import shadows


def explained(error: BaseException) -> str | None:
    """Which library from outside the environment, which missing one or which shared library is the cause of ``error``; None for other
    errors."""
    for part in _chain(error):
        reason = _first_lines(part)
        for name in _suspects(part):
            if library := shadows.shadow(name):
                return f"{library}, and does not work here: {reason}; {library.way_out}"
        if isinstance(part, ModuleNotFoundError) and part.name in shadows.REQUIRED:
            return f"hpclm needs {part.name}, which {sys.executable} does not have{_remedy(part.name)}"
        if isinstance(part, ImportError | OSError) and (libraries := _shared_libraries(str(part))):
            about = [line.strip() for line in str(part).splitlines() if ".so" in line]
            return f"{type(part).__name__}: {about[0]}; {libraries}"
        home = os.environ.get("PYTHONHOME")
        if home and isinstance(part, ImportError) and _top(part.name or "").lstrip("_") in sys.stdlib_module_names:
            return f"{reason}; PYTHONHOME={home} makes {sys.executable} look for Python's own library there: unset PYTHONHOME"
    return None


def noted() -> str:
    """The libraries from outside the environment that are loaded, for the end of a traceback that ``explained`` does not explain; or
    empty."""
    loaded = [name for name in (*shadows.REQUIRED, *shadows.OPTIONAL) if name in sys.modules]
    return "".join(f"note: {library}\n" for library in map(shadows.shadow, loaded) if library)


def report_uncaught() -> None:
    """From now on, an uncaught exception, such as one while hpclm itself is imported, is explained if it can be."""
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        os.write(2, b"interrupted\n")
        os._exit(ExitCode.INTERRUPTED)
    try:
        reason = explained(error)
    except Exception:  # what explains may be shadowed, too
        reason = None
    with suppress(Exception):  # the same
        from hpclm.node import ends

        ends.note(ExitCode.INVALID if reason else ExitCode.FAILED, reason or f"{kind.__name__}: {error}")
    if reason is None:
        sys.__excepthook__(kind, error, trace)
        return
    os.write(2, f"error: {reason}\n".encode(errors="backslashreplace"))
    os._exit(ExitCode.INVALID)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}" if lines else type(error).__name__


def _suspects(error: BaseException) -> Iterator[str]:
    """Top-level modules that may be the cause of ``error``, the most likely first."""
    if isinstance(error, ImportError) and error.name:
        yield _top(error.name)
    if isinstance(error, AttributeError):
        owner = error.obj
        yield _top(owner.__name__ if isinstance(owner, ModuleType) else str(getattr(owner, "__module__", "")))
    if isinstance(error, SyntaxError) and error.filename:
        yield from shadows.module_of_file(error.filename)
    frames = reversed(list(_frames(error)))
    being_imported = [frame for frame in frames if isinstance(error, ImportError) or frame.f_code.co_name == "<module>"]
    yield from dict.fromkeys(_top(str(frame.f_globals.get("__name__", ""))) for frame in being_imported)


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _top(module: str) -> str:
    return module.partition(".")[0]


def _remedy(name: str) -> str:
    """What to do about a missing library: it is in the user's site, which is hidden, or must be installed."""
    folder = shadows.user_site()
    if folder not in sys.path and shadows.find(name, [folder]):
        return (
            f", but the user's site, {folder}, has it, which is hidden here: install it into the environment, or set "
            "PYTHONNOUSERSITE to nothing (job.env.PYTHONNOUSERSITE='')"
        )
    return ": activate the environment that hpclm is installed in, or pip install hpclm into this one"


def _shared_libraries(message: str) -> str:
    """Which variables name the shared libraries that ``message``, of the dynamic linker, is about; or empty."""
    named = dict.fromkeys(Path(path).name for path in re.findall(r"[\w./+-]*\.so\b[\w.]*", message))
    parts = []
    for folder in shadows.library_folders():
        if here := [name for name in named if (Path(folder) / name).exists()]:
            parts.append(f"LD_LIBRARY_PATH entry {folder!r} has {', '.join(here)}")
    if named and (preloaded := os.environ.get("LD_PRELOAD")):
        parts.append(f"LD_PRELOAD={preloaded} is set")
    return "; ".join(parts)
