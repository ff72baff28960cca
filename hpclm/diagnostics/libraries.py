"""Whether the libraries that training needs can be imported, and which come from outside the environment."""

import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from hpclm.node import import_errors, shadows
from hpclm.node.shadows import Shadow

TRAINING = "hpclm.training.loop"
"""What every rank imports."""
DISTRIBUTIONS = {"yaml": "PyYAML"}
"""The names of packages that differ from that of their module."""


def imports() -> dict[str, Any]:
    """What goes wrong when this process imports what training does, a line for each library; and where its shared libraries are from."""
    outside = {library.name: library for library in shadows.outside()}
    failures: list[str] = []
    for name in dict.fromkeys([*outside, *shadows.REQUIRED, TRAINING]):
        try:
            module = import_module(name)
        except Exception as error:
            failures.append(import_errors.explained(error) or f"{name} cannot be imported: {reason(error)}")
            continue
        if name in outside:
            failures += _too_old(outside[name], module)
    by_library = {text.partition(" ")[0]: text for text in reversed(failures)}  # the first of each
    return {"import_failures": [*by_library.values()][::-1], "linked": shadows.linked()}


def reason(error: BaseException) -> str:
    """The kind of an error, and the last line of its text."""
    return ": ".join([type(error).__name__, *[line.strip() for line in str(error).splitlines() if line.strip()][-1:]])


def _too_old(library: Shadow, module: ModuleType) -> Iterator[str]:
    """That a library from outside the environment is older than what hpclm needs."""
    version = str(getattr(module, "__version__", ""))
    name = DISTRIBUTIONS.get(library.name, library.name)
    with suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires("hpclm") or ():
            if (match := re.match(rf"{name}\s*>=\s*([\d.]+)", requirement, re.IGNORECASE)) and (
                _numbers(version) < _numbers(match[1])
            ):
                yield f"{library}: version {version}, but hpclm needs {name}>={match[1]}; {library.way_out}"


def _numbers(version: str) -> list[int]:
    """The release of a version, as numbers that can be compared."""
    start = re.match(r"[\d.]*", version)
    return [int(part) for part in (start[0] if start else "").split(".") if part]
