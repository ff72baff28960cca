"""The code of a run: its files, a snapshot of them in the run directory, and a digest that tells whether they have changed.

The code is hpclm itself, the user's modules that settings name (``data.tokenizer=my.mod:Tok``), and what these import from
their own folder; installed libraries are not included.
"""

import ast
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from hpclm.base import files, shipped
from hpclm.base.errors import ConfigError
from hpclm.node import environment, processes
from hpclm.node.processes import NoAnswerError

Sources = Mapping[str, Path]
"""Files by their names relative to Python's search path: hpclm/loop.py, mine.py."""

ROOT = Path(__file__).parents[1]
NOTE = "SNAPSHOT.json"
MAX_CODE_BYTES = 1 << 26  # bytes of all files


def sources(modules: Collection[str]) -> Sources:
    """The files of hpclm and of the user's top-level ``modules``, as Python would find them now."""
    code = _package(ROOT)
    for module in modules:
        origin = _own(module)
        if origin is None:
            continue
        folder = origin.parent
        if origin.name == "__init__.py":
            folder = folder.parent
        known = {"hpclm"}
        waiting = [module]
        while waiting:
            name = waiting.pop()
            if name in known:
                continue
            known.add(name)
            found = _files(folder, name)
            code |= found
            for path in found.values():
                waiting += _imported(path)
    return code


def digest(code: Sources) -> str:
    """A digest that changes if any file does."""
    total = hashlib.sha256()
    for name in sorted(code):
        content = files.read_bytes(code[name])
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:12]


def contents(code: Sources) -> dict[str, str]:
    """The digest of each file."""
    return {name: digest({name: path}) for name, path in code.items()}


def folder(out: Path, code: Sources) -> Path:
    """Where the snapshot of these files is in the run directory ``out``."""
    return out / "job" / f"code-{digest(code)}"


def keep(out: Path, code: Sources) -> Path:
    """Copy the code into the run directory, unless it is there already; returns the snapshot."""
    size = sum(path.stat().st_size for path in code.values())
    if size > MAX_CODE_BYTES:
        raise ConfigError(
            f"job.snapshot=true would copy {size >> 20} MB of code: move data out of the folders of your modules, or leave "
            "job.snapshot out"
        )
    copy = folder(out, code)
    if copy.is_dir():
        return copy
    files.sweep(copy)
    draft = files.aside(copy)
    for name, path in code.items():
        (draft / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(path, draft / name)
    note = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "git": revision(), "from": str(ROOT.parent)}
    files.write_text(draft / NOTE, json.dumps(note) + "\n")
    draft.rename(copy)
    return copy


def check_snapshot() -> None:
    """ConfigError if this process does not run the code of its snapshot."""
    snapshot = environment.snapshot()
    runs = ROOT.resolve()
    if snapshot and not runs.is_relative_to(snapshot.resolve()):
        raise ConfigError(
            f"job.snapshot=true: this process should run {snapshot}, but runs {runs}; do not change PYTHONPATH in job.setup"
        )


def revision() -> str | None:
    """Commit of the code, with "-dirty" if files differ; None if unknown."""
    commit: str | None = None
    snapshot = environment.snapshot()
    if snapshot:
        with suppress(OSError, ValueError, KeyError):
            commit = json.loads(files.read_text(snapshot / NOTE))["git"]
    elif not shipped.installed():  # an environment may lie in the repository of something else
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with suppress(NoAnswerError):
            code, head, _ = processes.ask(describe, 10.0)
            if code == 0:
                commit = head.strip()
    return commit


def _imported(path: Path) -> set[str]:
    """The top-level names that a Python file imports; empty for other files, or if Python cannot parse the file."""
    names = list[str]()
    if path.suffix != ".py":
        return set()
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(files.read_bytes(path), str(path))):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
    return {name.partition(".")[0] for name in names}


def _files(folder: Path, name: str) -> dict[str, Path]:
    """The files, by name, of the module or package that ``import name`` finds in ``folder``."""
    path = folder / f"{name}.py"
    if path.exists() and not (folder / name / "__init__.py").exists():
        return {path.name: path}
    return _package(folder / name)


def _package(root: Path) -> dict[str, Path]:
    """The files of a package by name, without hidden files, which editors and NFS make; empty if ``root`` is not a folder."""
    names = {str(path.relative_to(root.parent)): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: path for name, path in names.items() if "__pycache__" not in path.parts and "/." not in name}


def _own(top: str) -> Path | None:
    """The file of the user's module or package ``top``; None if it is installed, or does not exist."""
    spec = PathFinder.find_spec(top, [*map(str, filter(None, [environment.snapshot()])), *sys.path])
    if spec is None or not spec.has_location or not spec.origin:
        return None
    origin = Path(spec.origin)
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(origin.parts)
    if is_installed or origin.is_relative_to(Path(ast.__file__).parent):
        return None
    return origin
