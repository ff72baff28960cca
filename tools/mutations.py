"""Put one fault at a time into a copy of the training core, and check that a test fails: python tools/mutations.py [NAME ...]

Each fault is one that training would survive without a word: a lost reduction, a wrong factor or count, a seed that repeats, state of a
neighbour. The result is a table: each fault, and the first test that caught it. --table writes it to docs/mutations.md, where faults
that were not tried keep their row. Exit code 1 if one was not caught.
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
PAGE = ROOT / "docs" / "mutations.md"
HEAD = "| fault | caught by `tests/…` |\n|---|---|\n"


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


def known() -> list[Fault]:
    """All faults."""
    return [Fault(**row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())]


def row(fault: Fault, caught: bool, by: str) -> str:
    """A line of the table."""
    return f"| {fault.fault} | {f'`{by}`' if caught else f'**not caught**: {by}'} |"


def write(rows: dict[str, str]) -> None:
    """Put ``rows``, by the names of their faults, into the page, in the order of the faults."""
    top, _, table = PAGE.read_text().partition(HEAD)
    before = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    rows = {**before, **rows}
    PAGE.write_text(top + HEAD + "".join(f"{rows[each.fault]}\n" for each in known() if each.fault in rows))


def main() -> None:
    """Try all faults, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only the faults with one of these words in their names")
    parser.add_argument("--table", action="store_true", help="write the results to docs/mutations.md")
    given = parser.parse_args()
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
        print(HEAD, end="", flush=True)
        for fault in known():
            if given.names and not any(name in fault.fault for name in given.names):
                continue
            caught, by = tried(fault, folder)
            missed += not caught
            print(line := row(fault, caught, by), flush=True)
            if given.table:
                write({fault.fault: line})
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
