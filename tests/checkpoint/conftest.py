"""Two good checkpoints, and a place for copies of them."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.checkpoint.state import saved


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("good") / "c"
    saved(folder, (1, 2), keep=2)
    return folder


@pytest.fixture
def folder(tmp_path):
    """In memory where there is such a place: a kill, unlike a power cut, does not tell the disk's cache from the disk."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    yield made / "c"
    shutil.rmtree(made)
