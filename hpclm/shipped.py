"""The presets (configs/) and job templates (slurm/): at the top of a clone, and inside the package in an installed wheel."""

from pathlib import Path

PACKAGE = Path(__file__).parent


def folder(name: str) -> Path:
    """Where ``name``, configs or slurm, is; the folder may be missing, as in a snapshot of the code."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def installed() -> bool:
    """Whether hpclm is installed like a library, rather than run from a clone."""
    return PACKAGE.parent.name in ("site-packages", "dist-packages")
