"""Every Python example of the documentation, as strict type checkers see it."""

import json
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
STRICT = (
    "# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, disallow-untyped-defs, extra-checks, "
    "disallow-incomplete-defs, check-untyped-defs, disallow-untyped-decorators, warn-unused-ignores, warn-return-any, "
    "no-implicit-reexport, strict-equality\n"
)
"""mypy --strict, without the option itself: with it, what mypy knows of hpclm and PyTorch would be checked anew."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    for number, text in enumerate(EXAMPLES):
        (folder / f"page_{number}.py").write_text(STRICT + text)
    return folder


def test_pyright_is_strict_and_finds_nothing(scripts):
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(ROOT)]}
    (scripts / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable], cwd=scripts, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_mypy_is_strict_and_finds_nothing(scripts):
    command = [sys.executable, "-m", "mypy", *scripts.glob("*.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
