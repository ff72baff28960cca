"""Files that lie beside the project for its developers; tests that read them skip where they are absent."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"


def shared(name: str) -> Path:
    """A path below ../shared, or a skip."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not here")
    return path
