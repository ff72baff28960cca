"""Libraries that Python finds before those of its environment: through PYTHONPATH, the user's site (~/.local), a script's folder.

It explains why imports fail (``import_errors``), so it imports little, and only what is Python's own.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

REQUIRED = (
    *("torch", "numpy", "omegaconf", "yaml", "submitit", "orjson", "psutil", "tokenizers", "xxhash", "tensorboard"),
    *("tqdm", "wcwidth"),
)
"""What hpclm cannot train without, by the names that are imported (setup.cfg)."""
OPTIONAL = (
    *("deepspeed", "fairscale", "mpi4py", "transformers", "safetensors", "sentencepiece", "pyarrow", "wandb", "mlflow"),
    *("trackio", "triton"),
)
"""Other libraries that `hpclm doctor` looks for outside the environment."""


class Shadow(NamedTuple):
    """A library that is imported from outside the environment."""

    name: str
    path: str
    """Its file."""
    source: str
    """What makes Python look there, and where that is."""
    way_out: str
    instead: str
    """The file of the environment's own one, or empty."""

    def __str__(self) -> str:
        instead = f" instead of {self.instead}" if self.instead else ""
        return f"{self.name} comes from {self.path} ({self.source}){instead}"


def shadow(name: str) -> Shadow | None:
    """Where the top-level module ``name`` comes from if that is outside the environment. None too for what only exists there, unless
    hpclm uses it: that is the user's own code."""
    entry, path = _location(name)
    if name == "hpclm" or not entry or _is_environment(entry):
        return None
    instead = _in_environment(name)
    if not instead and name not in (*REQUIRED, *OPTIONAL):
        return None
    return Shadow(name, path, *_source(entry), instead)


def outside(names: Iterable[str] = (*REQUIRED, *OPTIONAL)) -> list[Shadow]:
    """Which of the libraries ``names`` come from outside the environment, and modules of Python's own library that do."""
    beside = {name for entry in dict.fromkeys(sys.path) if not _is_environment(entry) for name in _modules_in(entry)}
    names = dict.fromkeys([*names, *sorted(beside & sys.stdlib_module_names)])
    return [library for library in map(shadow, names) if library]


def environment_folders() -> list[str]:
    """The folders of Python's own library and of the packages installed in its environment."""
    import site

    library = Path(os.__file__).parent
    archive = library.parent / f"python{sys.version_info[0]}{sys.version_info[1]}.zip"  # that need not exist
    return [str(library), str(library / "lib-dynload"), str(archive), *site.getsitepackages()]


def user_site() -> str:
    """The folder of what ``pip install --user`` installs for this Python."""
    import site

    return str(site.getusersitepackages())


def find(name: str, path: Sequence[str]) -> Any:
    """The specification of the module ``name`` in the folders ``path``, or None."""
    from importlib.machinery import PathFinder

    try:
        return PathFinder.find_spec(name, list(path))
    except Exception:  # of a hook that somebody has installed
        return None


def module_of_file(path: str) -> Iterator[str]:
    """The top-level module that a file of Python code belongs to."""
    for entry in sys.path:
        if Path(path).is_relative_to(Path(entry).absolute()):
            yield Path(path).relative_to(Path(entry).absolute()).parts[0].removesuffix(".py")


def linked(maps: Path = Path("/proc/self/maps")) -> dict[str, str]:
    """The shared libraries that this process has from folders of LD_LIBRARY_PATH or by LD_PRELOAD: file -> variable."""
    folders = {str(Path(folder).resolve()) for folder in library_folders()}
    preloaded = {str(Path(path).resolve()) for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()}
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    paths = sorted({fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6 and ".so" in fields[5]})
    by_folder = {path: "LD_LIBRARY_PATH" for path in paths if str(Path(path).parent) in folders}
    return by_folder | {path: "LD_PRELOAD" for path in paths if path in preloaded}


def library_folders() -> list[str]:
    """The folders of LD_LIBRARY_PATH."""
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]


def _location(name: str) -> tuple[str, str]:
    """The folder in which Python looked for the module ``name``, and the file that it has it from; empty if neither is known, as of
    what is built into Python."""
    spec = getattr(sys.modules.get(name), "__spec__", None) or find(name, sys.path)
    origin = getattr(spec, "origin", None)
    if not origin or not Path(origin).is_absolute():
        return "", ""
    folder = Path(origin).parent
    return str(folder.parent if spec.submodule_search_locations else folder), origin


def _in_environment(name: str) -> str:
    """The file from which the environment would have the module ``name``; empty if it has none."""
    return str(getattr(find(name, environment_folders()), "origin", None) or "")


def _is_environment(entry: str) -> bool:
    return any(_same(entry, folder) for folder in environment_folders())


def _modules_in(entry: str) -> set[str]:
    """The names of the modules in a folder of sys.path."""
    try:
        return {path.name.partition(".")[0] for path in Path(entry).iterdir()}
    except OSError:
        return set()


def _source(entry: str) -> tuple[str, str]:
    """What makes Python look in ``entry``, and how to change that."""
    if _same(entry, user_site()):
        return f"the user's site, {entry}", "set PYTHONNOUSERSITE=1, or pip uninstall it there"
    for named in os.environ["PYTHONPATH"].split(os.pathsep) if os.environ.get("PYTHONPATH") else ():
        if _same(entry, named):
            return f"PYTHONPATH entry {named!r}", "take that entry out of PYTHONPATH, or unload the module that sets it"
    if pth := _pth_file(entry):
        return f"{pth} names {entry}", "remove that line"
    if _same(entry, "."):
        return f"the current folder, {entry}", "rename it, or start elsewhere"
    if sys.path and _same(entry, sys.path[0]):
        return f"the script's folder, {entry}", "rename it"
    return f"sys.path entry {entry!r}", "take that entry out of sys.path"


def _pth_file(entry: str) -> str:
    """The .pth file by which ``entry`` is in sys.path; empty if there is none."""
    from hpclm import files

    for folder in map(Path, (*environment_folders(), user_site())):
        for path in sorted(folder.glob("*.pth")):
            try:
                lines = files.read_text(path, errors="replace").splitlines()
            except OSError:
                continue
            if any(_same(entry, str(folder / line)) for line in lines if line.startswith(("/", "."))):
                return str(path)
    return ""


def _same(entry: str, other: str) -> bool:
    return Path(entry).resolve() == Path(other).resolve()
