"""Every Python example of the documentation, as strict type checkers see it."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.runs import ROOT
from tests.test_documentation import PAGES

EXAMPLES = [
    "\n".join(blocks)
    for page in PAGES
    if "hpclm" in "".join(blocks := re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]
"""The examples of each page that use hpclm, as one script."""
BEHIND = ["torch", "numpy", *(f"hpclm.{room}" for room in ("commands", "inference", "datasets", "launch", "reporting"))]
"""What functions import that no example sees; mypy would take half a minute for it."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    for number, text in enumerate(EXAMPLES):
        (folder / f"page_{number}.py").write_text(text)
    return folder


def test_pyright_is_strict_and_finds_nothing(scripts):
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.10", "extraPaths": [str(ROOT)]}
    (scripts / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable], cwd=scripts, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_mypy_is_strict_and_finds_nothing(scripts):
    skipped = ",mypy-".join(f"{name}.*" for name in BEHIND)
    (scripts / "mypy.ini").write_text(f"[mypy]\nfollow_imports = silent\n[mypy-{skipped}]\nfollow_imports = skip\n")
    env = os.environ | {"MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", "--strict", "."]
    done = subprocess.run(command, cwd=scripts, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
