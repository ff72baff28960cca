"""Put one fault at a time into a copy of the training core, and check that a test fails: python tools/mutations.py [NAME ...]

Each fault is one that training would survive without an error: a lost reduction, a wrong factor or count, a seed that repeats, state of a
neighbour. Prints each fault and the first test that caught it. Exit code 1 if one was not caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
COPIED = ("hpclm", "tests", "tools", "configs", "slurm", "docs", "setup.cfg", "setup.py", "pyproject.toml", "README.md")
LAST = re.compile(r"^FAILED (?:tests/)?(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A change of one line, and the tests that are to notice it."""

    fault: str
    """What is wrong."""
    file: str
    """Below hpclm/."""
    old: str
    new: str
    tests: str
    """Arguments of pytest."""


def tried(fault: Fault, folder: Path) -> tuple[bool, str]:
    """Whether a test fails with the fault, and which; the copy in ``folder`` is whole again afterwards."""
    path = folder / "hpclm" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        return False, f"{fault.file} has this line {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new))
    try:
        words, _, chosen = fault.tests.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words.split()]
        command += ["-k", chosen] if chosen else []
        env = dict(os.environ, PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text)
    caught = LAST.search(done.stdout)
    return (
        (True, caught[1])
        if done.returncode == 1 and caught
        else (False, f"exit {done.returncode}: {done.stdout[-300:]}")
    )


def all_faults() -> list[Fault]:
    """All faults."""
    return [Fault(**row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())]


def table(faults: list[Fault]) -> str:
    """Names of faults as a Markdown table, a row for each part of the code."""
    parts: dict[str, list[str]] = {}
    for part, _, what in (fault.fault.partition(": ") for fault in faults):
        parts.setdefault(part, []).append(what)
    rows = [f"| {part} | {'; '.join(names)} |" for part, names in parts.items()]
    return "\n".join(["| part | faults |", "|---|---|", *rows])


def main() -> None:
    """Try all faults, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only the faults with one of these words in their names")
    parser.add_argument("--table", action="store_true", help="try nothing: print the faults as a Markdown table")
    given = parser.parse_args()
    chosen = [fault for fault in all_faults() if not given.names or any(name in fault.fault for name in given.names)]
    if given.table:
        print(table(chosen))
        return
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        folder.mkdir()
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        beside = ROOT.parent / "shared"  # where tests find reference files
        if beside.exists():
            (Path(temporary) / "shared").symlink_to(beside)
        for fault in chosen:
            caught, by = tried(fault, folder)
            missed += not caught
            print(f"{fault.fault}: {'caught by' if caught else 'NOT CAUGHT:'} {by}", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
