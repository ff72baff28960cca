"""A copy of this checkout into which one fault after another is put, and in which tests run in forks that have the libraries imported."""

import contextlib
import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers",
    "deepspeed",
    "fairscale",
    "accelerate",
    "yaml",
)
PR_SET_PDEATHSIG = 1
STUCK = 120.0
"""Seconds for one test: a fault may leave ranks waiting for each other."""


@dataclass(frozen=True)
class Fault:
    """A change of one place in hpclm, and the cheapest test that notices it."""

    fault: str
    """What is wrong."""
    file: str
    """Below hpclm/."""
    old: str
    """Text that the file has once."""
    new: str
    test: str = ""
    """Its name in pytest."""


class Copy:
    """A copy of all files that git knows or does not ignore, with ``shared`` beside it if this checkout has it."""

    def __init__(self, beside: Path) -> None:
        self.folder = beside / "copy"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        if (ROOT.parent / "shared").exists():
            (beside / "shared").symlink_to((ROOT.parent / "shared").resolve())

    @contextlib.contextmanager
    def with_fault(self, fault: Fault) -> Any:
        """The copy has the fault."""
        path = self.folder / "hpclm" / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise ValueError(f"{fault.fault}: {fault.file} has its line {text.count(fault.old)} times")
        try:
            self._write(path, text.replace(fault.old, fault.new))
            yield
        finally:
            self._write(path, text)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()  # Python compares whole seconds and sizes: it would take the text before for this one

    def first_failure(self, tests: Sequence[str]) -> str:
        """The first of ``tests``, in this order, that fails or hangs; a file that cannot be imported; else nothing."""
        told = self.folder.parent / "told.txt"
        told.write_text("")
        child = os.fork()
        if child == 0:
            _run(self.folder, tests, told)
        seen, since = "", time.monotonic()
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.05)
            if (text := told.read_text()) != seen:
                seen, since = text, time.monotonic()
            elif time.monotonic() - since > STUCK:
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a failed test has left
        lines = [line.partition(" ")[::2] for line in told.read_text().splitlines()]
        failed = next((name for word, name in lines if word == "failed"), "")
        if failed or ended[1] == 0:
            return failed
        if not lines:
            raise RuntimeError(f"pytest ended with {ended[1]}: {(self.folder.parent / 'out.txt').read_text()[-2000:]}")
        return lines[-1][1]  # it hung, or ended the process


class Only:
    """A plugin for pytest: runs these tests in this order, and writes what begins and fails."""

    def __init__(self, tests: Sequence[str], told: Path) -> None:
        self.order = {name: place for place, name in enumerate(tests)}
        self.told = told

    def _tell(self, word: str, name: str) -> None:
        with self.told.open("a") as file:
            file.write(f"{word} {name}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Choose and order."""
        chosen = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say what begins."""
        self._tell("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say what fails."""
        if report.failed:
            self._tell("failed", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say what cannot be imported."""
        if report.failed:
            self._tell("failed", report.nodeid)


def import_libraries() -> None:
    """Import what tests need and no fault concerns, once for all forks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _run(folder: Path, tests: Sequence[str], told: Path) -> None:
    """Be pytest in the copy, in a process group of one's own."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the program that forked it
    out = os.open(folder.parent / "out.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for number, opened in enumerate((os.open(os.devnull, os.O_RDONLY), out, out)):
        os.dup2(opened, number)
    os.chdir(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hpclm", "tests")]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # which multiprocessing would import again
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry and Path(entry) not in (ROOT, ROOT / "tools"))]
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    words = ["-x", "-q", "-W", known, "-p", "no:cacheprovider", "-p", "no:rerunfailures", *files]
    code = 1
    try:
        code = int(pytest.main(words, plugins=[Only(tests, told)]))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
