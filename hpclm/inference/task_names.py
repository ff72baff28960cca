"""Checks whether lm-evaluation-harness has a task, without importing the library and PyTorch, which takes 15 seconds."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.base.registry import hint

WORD = re.compile(rb"[^\s\"'\[\],#{}]+")
NAME = re.compile(r"^[\s-]*(?:task|group|tag)\s*:\s*[\"']?([\w.:-]+)", re.MULTILINE)


def check_task_names(names: Sequence[str], folder: str | None) -> None:
    """ConfigError for names that appear neither in the files of the library's tasks nor in ``folder``, if given.

    A name that appears there may still not be a task; the library then reports it.
    """
    for name in names:
        if "/" in name or name.endswith(".yaml"):
            raise ConfigError(f"{name} is not the name of a task; give the folder of a task file as --tasks-path")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"{folder} is not a folder of task files")
    library = importlib.util.find_spec("lm_eval")
    if library is None:  # reported when it is imported
        return
    folders = [f"{path}/tasks" for path in library.submodule_search_locations or []]
    if folder:
        folders.insert(0, folder)
    missing = {name.encode() for name in names}
    for path in _task_files(folders):
        missing -= set(WORD.findall(_content(path)))
        if not missing:
            return
    text = (_content(path).decode(errors="replace") for path in _task_files(folders))
    available = sorted({name for content in text for name in NAME.findall(content)})
    raise ConfigError([no_task(name, available) for name in names if name.encode() in missing])


def no_task(name: str, available: Sequence[str]) -> str:
    """The error message that the library has no task ``name``."""
    return f"lm-evaluation-harness has no task {name!r}; your own tasks need --tasks-path.{hint(name, list(available))}"


def _task_files(folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in Path(folder).rglob("*") if path.suffix != ".pyc" and files.is_file(path))


def _content(path: Path) -> bytes:
    try:
        return files.read_bytes(path)
    except OSError:
        return b""
