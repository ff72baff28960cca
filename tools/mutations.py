"""Put one fault at a time into a copy of this checkout, and check that its test in tools/mutations.yaml fails.

    tools/mutations.py [NAME ...]             all faults, or those with one of these words in their names
    tools/mutations.py --search [NAME ...]    look for the cheapest test that notices each, and write it into the table
    tools/mutations.py --table                print the faults as a Markdown table

Each fault is one that a run would survive without an error: a lost reduction, a wrong factor or count, a check that no longer refuses.
A search tries only tests that run a line of the fault, the cheapest first; `tools/test_costs.py --lines` records which these are.
Tests that are newer than this record are tried too.
Exit code 1 if a fault was not caught.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from mutation_copy import Copy, Fault, import_libraries  # noqa: E402

from tests import sizes  # noqa: E402

TABLE = ROOT / "tools/mutations.yaml"
LINES = ROOT / ".test-lines"
MOST = 60.0
"""CPU-seconds of cheap tests, and of costly ones, that a search tries for one fault."""

_copy: Copy  # of this process


def all_faults(path: Path = TABLE) -> list[Fault]:
    """All faults."""
    return [Fault(**row) for row in yaml.safe_load(path.read_text())]


def table(faults: Sequence[Fault]) -> str:
    """Names of faults as a Markdown table, a row for each part of the code."""
    parts: dict[str, list[str]] = {}
    for part, _, what in (fault.fault.partition(": ") for fault in faults):
        parts.setdefault(part, []).append(what)
    rows = [f"| {part} | {'; '.join(names)} |" for part, names in parts.items()]
    return "\n".join(["| part | faults |", "|---|---|", *rows])


def candidates(fault: Fault) -> list[str]:
    """Tests that run a line of the fault, or any of its file if none does: those of its folder first, then the cheapest."""
    from coverage import CoverageData

    data = CoverageData(str(LINES))
    data.read()
    path = next((name for name in data.measured_files() if name.endswith(f"hpclm/{fault.file}")), "")
    by_line = data.contexts_by_lineno(path) if path else {}
    text = (ROOT / "hpclm" / fault.file).read_text()
    first = text[: text.index(fault.old)].count("\n") + 1
    lines = range(first, first + fault.old.count("\n") + 1)
    found = {name for line in lines for name in by_line.get(line, ())} - {""}
    found = (found or {name for names in by_line.values() for name in names} - {""}) | newer()
    own = f"tests/{Path(fault.file).parts[0].removesuffix('.py')}"
    there = [name for name in found if (ROOT / name.partition("::")[0]).exists()]
    return sorted(there, key=lambda name: (not name.startswith(own), recorded().get(name, 0.0)))


@functools.cache
def recorded() -> dict[str, float]:
    """CPU-seconds of each test when its lines were recorded."""
    rows = (line.split(" ", 2) for line in Path(f"{LINES}.costs").read_text().splitlines())
    return {name: float(cpu) for cpu, _, name in rows}


@functools.cache
def newer() -> set[str]:
    """Tests that are newer than the record."""
    listed = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-o",
        "addopts=",
        "-m",
        "not gpu and not slurm",
        "tests",
    ]
    lines = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    # tests of this table fail with every fault
    return {line for line in lines if "::" in line and "test_mutations" not in line} - recorded().keys()


def search(fault: Fault, chosen: frozenset[str]) -> str:
    """The cheapest test that notices the fault and passes without it; else nothing. ``chosen``: costly tests that other faults need."""
    costly, tests = sizes.costs().keys(), candidates(fault)
    cheap = [name for name in tests if name not in costly]
    others = sorted(costly & tests, key=lambda name: (name not in chosen, sizes.costs()[name]))
    for group in cheap, others:
        spent, left = 0.0, list[str]()
        for name in group:
            spent += recorded().get(name, 0.0)
            if spent < MOST or name in chosen or not left:
                left.append(name)
        while left:
            with _copy.with_fault(fault):
                found = _copy.first_failure(left)
            if not found:
                break
            if not _copy.first_failure([found]):
                return found
            left = left[left.index(found) + 1 :] if found in left else []  # it fails without the fault, too
    return ""


def noticed(fault: Fault) -> str:
    """The fault's own test, if it fails with the fault."""
    with _copy.with_fault(fault):
        return _copy.first_failure([fault.test]) if fault.test else ""


def written(text: str, fault: str, test: str) -> str:
    """The table's text with the test of one fault."""
    begin = text.index(f"- fault: {yaml.safe_dump(fault, width=1000).removesuffix('...' + chr(10)).strip()}\n")
    end = text.find("\n- fault: ", begin) + 1 or len(text)
    kept = [line for line in text[begin:end].splitlines() if not line.startswith("  test: ")]
    test_line = yaml.safe_dump({"test": test}, width=1000).strip()
    return text[:begin] + "\n".join([*kept, f"  {test_line}"]) + "\n" + text[end:]


def _begin(folder: str) -> None:
    global _copy
    beside = Path(folder) / str(os.getpid())
    beside.mkdir()
    _copy = Copy(beside)


def main() -> int:
    """Try all faults, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only the faults with one of these words in their names")
    parser.add_argument(
        "--search", action="store_true", help="look for the cheapest test of each, and write it into the table"
    )
    parser.add_argument("--table", action="store_true", help="try nothing: print the faults as a Markdown table")
    parser.add_argument("--file", type=Path, default=TABLE, help="another table of faults")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="faults at a time (default: one for each core)"
    )
    given = parser.parse_args()
    chosen = [
        fault for fault in all_faults(given.file) if not given.names or any(name in fault.fault for name in given.names)
    ]
    if given.table:
        print(table(chosen))
        return 0
    if not chosen:
        parser.error(f"no fault has {' or '.join(given.names)} in its name; --table lists them")
    if given.search and not LINES.exists():
        parser.error("a search needs to know which tests run which lines: tools/test_costs.py --lines records it")
    import_libraries()
    if given.search:
        newer()
    missed, costly = 0, sizes.costs().keys() & {fault.test for fault in all_faults()}
    waiting, running = list(reversed(chosen)), dict[Future[str], Fault]()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.workers, get_context("fork"), _begin, (folder,)) as pool,
    ):
        while waiting or running:
            while waiting and len(running) < given.workers:
                fault = waiting.pop()
                work = partial(search, chosen=frozenset(costly)) if given.search else noticed
                running[pool.submit(work, fault)] = fault
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                fault, by, why = running.pop(future), "", ""
                try:
                    by = future.result()
                except (RuntimeError, ValueError) as error:
                    why = f": {error}"
                missed += not by
                if by and given.search:
                    given.file.write_text(written(given.file.read_text(), fault.fault, by))
                    costly |= sizes.costs().keys() & {by}
                print(f"{fault.fault}: {f'caught by {by}' if by else f'NOT CAUGHT{why}'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
