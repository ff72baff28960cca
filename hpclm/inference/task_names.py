"""Whether lm-evaluation-harness has a task, without importing the library and PyTorch, which takes a quarter of a minute."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.registry import hint

WORD = re.compile(rb"[^\s\"'\[\],#{}]+")
NAME = re.compile(r"^[\s-]*(?:task|group|tag)\s*:\s*[\"']?([\w.:-]+)", re.MULTILINE)


def check(names: Sequence[str], folder: str | None) -> None:
    """ConfigError for names of tasks that no file of the library's tasks contains, nor one in ``folder``, if there is one.

    A name that a file contains may still be no task: then the library says so.
    """
    for name in names:
        if "/" in name or name.endswith(".yaml"):
            raise ConfigError(f"{name} is not the name of a task; give the folder of a task file as --tasks-path")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"{folder} is not a folder of task files")
    library = importlib.util.find_spec("lm_eval")
    if library is None:  # which is said where it is imported
        return
    folders = [folder] if folder else []
    folders += [f"{path}/tasks" for path in library.submodule_search_locations or []]
    missing = {name.encode() for name in names}
    for path in _task_files(folders):
        missing -= set(WORD.findall(_content(path)))
        if not missing:
            return
    text = (_content(path).decode(errors="replace") for path in _task_files(folders))
    available = sorted({name for content in text for name in NAME.findall(content)})
    raise ConfigError([no_task(name, available) for name in names if name.encode() in missing])


def no_task(name: str, available: Sequence[str]) -> str:
    """That the library has no task called ``name``."""
    return (
        f"lm-evaluation-harness has no task {name!r}; tasks of your own need --tasks-path.{hint(name, list(available))}"
    )


def _task_files(folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in Path(folder).rglob("*") if path.suffix != ".pyc" and files.is_file(path))


def _content(path: Path) -> bytes:
    try:
        return files.read_bytes(path)
    except OSError:
        return b""
