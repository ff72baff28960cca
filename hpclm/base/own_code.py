"""Find the user's code, package.module:Name, without importing it: it may import PyTorch, which takes seconds."""

import ast
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from hpclm.base import files
from hpclm.base.registry import OWN, hint, in_standard_library, not_loaded, standard

DYNAMIC = frozenset({"*", "__getattr__", "__path__", "exec", "globals", "modules", "setattr", "vars"})
"""A module that uses one of these names may have attributes that its source does not show."""


def missing(setting: str, name: str) -> str | None:
    """The error if ``name``, the value of ``setting``, cannot be loaded because the module or the attribute does not exist.

    None if it can be loaded, or if only an import would tell.
    """
    if not OWN.fullmatch(name):
        return None
    module, _, attribute = name.partition(":")
    if standard(module):
        return in_standard_library(setting, name)
    if module in sys.modules:
        return None
    parts = module.split(".")
    path: list[str] | None = None
    names: set[str] | None = None
    origin: str | None = None
    for number in range(1, len(parts) + 1):
        part = ".".join(parts[:number])
        spec = _spec(part, path)
        if spec is None:
            return not_loaded(setting, name, f"No module named {part!r}")
        names = _names(spec)
        origin = spec.origin
        if names is None or names & DYNAMIC:
            return None
        path = list(spec.submodule_search_locations or [])
    if names is None or attribute in names:
        return None
    return not_loaded(setting, name, f"{origin or module} has no {attribute!r}.{hint(attribute, sorted(names))}")


def _spec(module: str, path: list[str] | None) -> ModuleSpec | None:
    """The spec of ``module``; None if it does not exist. ``path``: the folders of its package; None for a top-level module."""
    if path is None:
        return importlib.util.find_spec(module)
    for finder in sys.meta_path:
        spec = finder.find_spec(module, path)
        if spec:
            return spec
    return None


def _names(spec: ModuleSpec) -> set[str] | None:
    """All names in the source of a module, which may be more than it defines; None if the source cannot be read."""
    if spec.origin is None and spec.submodule_search_locations is not None:  # a folder without __init__.py
        return set()
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(files.read_bytes(Path(spec.origin)))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names
