"""The code of a run: its files, a snapshot of them in the run directory, and a digest that tells whether they have changed.

The code is hpclm itself, the user's modules that settings name (``data.tokenizer=my.mod:Tok``), and what these import from
their own folder; installed libraries are not included.
"""

import ast
import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path

from hpclm import files, shipped
from hpclm.config import RunConfig
from hpclm.config.assign import texts
from hpclm.errors import ConfigError
from hpclm.node import environment, processes
from hpclm.node.processes import NoAnswerError

Sources = Mapping[str, Path]
"""Files by the names they have below a folder of Python's path: hpclm/loop.py, mine.py."""

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*")
NOTE = "SNAPSHOT.json"
LARGEST = 1 << 26  # bytes of all files


def sources(config: RunConfig) -> Sources:
    """The files of the code that ``config`` runs, as Python would find them now."""
    found: dict[str, Path] = _package(ROOT)
    todo = sorted({match[1] for text in texts(asdict(config)) if (match := NAME.fullmatch(text))})
    seen = {"hpclm"}
    while todo:
        top = todo.pop()
        origin = None if top in seen else _own(top)
        seen.add(top)
        if origin is None:
            continue
        if origin.name == "__init__.py":
            new, place = _package(origin.parent), origin.parent.parent
        else:
            new, place = {origin.name: origin}, origin.parent
        found |= new
        beside = (name for path in new.values() if path.suffix == ".py" for name in _imported(path))
        todo += [name for name in beside if (place / f"{name}.py").exists() or (place / name).is_dir()]
    return found


def digest(found: Sources) -> str:
    """A digest that changes if any file does."""
    total = hashlib.sha256()
    for name in sorted(found):
        content = files.read_bytes(found[name])
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:12]


def contents(found: Sources) -> dict[str, str]:
    """The digest of each file."""
    return {name: digest({name: path}) for name, path in found.items()}


def folder(out: Path, found: Sources) -> Path:
    """Where the snapshot of these files is in the run directory ``out``."""
    return out / "job" / f"code-{digest(found)}"


def keep(out: Path, config: RunConfig) -> Path:
    """Copy the code of ``config`` into the run directory, unless it is there already; returns the snapshot."""
    found = sources(config)
    size = sum(path.stat().st_size for path in found.values())
    if size > LARGEST:
        largest = max(found, key=lambda name: found[name].stat().st_size)
        raise ConfigError(
            f"job.snapshot=true would copy {size >> 20} MB of code, most of it in {found[largest].parent}: move data out of "
            "the folders of your modules, or leave job.snapshot out"
        )
    copy = folder(out, found)
    if copy.is_dir():
        return copy
    files.sweep(copy)
    draft = files.aside(copy)
    for name, path in found.items():
        (draft / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(path, draft / name)
    note = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "git": revision(), "from": str(ROOT.parent)}
    files.write_text(draft / NOTE, json.dumps(note) + "\n")
    if difference := _git("diff", "HEAD", "--", "."):
        files.write_text(draft / "changes.diff", difference + "\n")
    draft.rename(copy)
    return copy


def check_snapshot() -> None:
    """ConfigError if this process runs another copy of the code than its snapshot."""
    wanted, runs = environment.snapshot(), ROOT.resolve()
    if wanted and not runs.is_relative_to(wanted.resolve()):
        raise ConfigError(
            f"job.snapshot=true: this process should run {wanted}, but runs {runs}; do not change "
            "PYTHONPATH in job.setup"
        )


def revision() -> str | None:
    """Commit of the code, with "-dirty" if files differ; None if unknown."""
    copied = environment.snapshot()
    if copied:
        with suppress(OSError, ValueError, AttributeError):
            said = json.loads(files.read_text(copied / NOTE)).get("git")
            return str(said) if said else None
        return None
    head = _git("rev-parse", "HEAD")
    return head and head + ("-dirty" if _git("status", "--porcelain", "-uno") else "")


def _git(*words: str) -> str | None:
    if shipped.installed():
        return None  # a repository around the environment is not that of hpclm
    try:
        code, output, _ = processes.ask(["git", "-C", str(ROOT), *words], 10.0)
    except NoAnswerError:
        return None
    return None if code else output.strip()


def _package(root: Path) -> dict[str, Path]:
    """All files of a package, by name; hidden ones, which editors and NFS make, and links to folders are left out."""
    names = {str(path.relative_to(root.parent)): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: path for name, path in names.items() if "__pycache__" not in path.parts and "/." not in name}


def _own(top: str) -> Path | None:
    """The file of the user's module or package ``top``; None if it is installed, or does not exist."""
    copied = environment.snapshot()
    spec = PathFinder.find_spec(top, [*([str(copied)] if copied else []), *sys.path])
    origin = Path(spec.origin) if spec and spec.has_location and spec.origin else None
    installed = {"site-packages", "dist-packages"}
    if origin is None or installed & set(origin.parts) or origin.is_relative_to(Path(ast.__file__).parent):
        return None
    return origin


def _imported(path: Path) -> Iterator[str]:
    """Top-level names of what a file imports."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(files.read_bytes(path))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]
