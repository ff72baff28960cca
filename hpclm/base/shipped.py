"""Folders that a clone has beside the package and a wheel inside it: presets (configs/), slurm/ and pages (docs/)."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
MORE_PAGES = ("ARCHITECTURE", "CHANGELOG")
"""Pages outside docs/."""


def folder(name: str) -> Path:
    """The folder ``name``: configs, slurm or docs. It may be missing, as in a snapshot of the code."""
    inside = PACKAGE / name
    return inside if inside.exists() else PACKAGE.parent / name


def presets() -> dict[str, Path]:
    """The settings files of hpclm by name: gpt2-124m, recipes/bigscience."""
    return _named("configs", ".yaml")


def pages() -> dict[str, Path]:
    """The pages of the documentation by name: data, recipes/bigscience, architecture."""
    return _named("docs", ".md") | {name.lower(): folder(f"{name}.md") for name in MORE_PAGES}


def _named(name: str, suffix: str) -> dict[str, Path]:
    top = folder(name)
    paths = sorted(top.rglob(f"*{suffix}"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(top).with_suffix("").as_posix(): path for path in paths}


def installed() -> bool:
    """Whether hpclm is installed as a package, rather than run from a clone."""
    return PACKAGE.parent.name in ("site-packages", "dist-packages")
