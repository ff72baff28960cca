"""Tests on a stand-in for a GPU, which somebody has set up and HPCLM_STANDIN names: tests/standin/README.md."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def lab():
    """A folder whose ``python`` sees a GPU that compiles and runs nothing, and ``python-computing`` one that computes."""
    named = os.environ.get("HPCLM_STANDIN")
    if not named:
        pytest.skip("HPCLM_STANDIN names no stand-in for a GPU: tests/standin/README.md")
    folder = Path(named)
    for name in ("python", "python-computing"):
        assert os.access(folder / name, os.X_OK), f"HPCLM_STANDIN={named} has no program {name}"
    return folder
