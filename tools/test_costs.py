"""Measure what each test costs, and write those that cost too much for the first size into tests/costs.txt.

    tools/test_costs.py                     all tests of `tools/test.sh --more`: half an hour and more on two cores
    tools/test_costs.py tests/engine        these; the rows of others stay as they are
    tools/test_costs.py --lines             also record in .test-lines which test runs which lines: what tools/mutations.py --search reads

Other words are passed on to pytest. As root the CPU time is that of a cgroup, which has all processes of a test in it. Exit code: pytest's.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import sizes  # noqa: E402

OURS = ROOT / "tools/coverage"


def written(measured: list[str]) -> None:
    """Put costs as the plugin writes them, ``CPU-SECONDS SECONDS NAME``, into the place of those that tests/costs.txt has."""
    kept = dict(sizes.costs())
    for line in measured:
        cpu, seconds, name = line.split(" ", 2)
        kept.pop(name, None)
        if float(cpu) >= sizes.CPU_SECONDS or float(seconds) >= sizes.SECONDS:
            kept[name] = float(cpu)
    sizes.COSTS.write_text("".join(f"{cpu:.1f} {name}\n" for name, cpu in sorted(kept.items())))


def main() -> int:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true", help="record the lines that each test runs, too")
    given, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder, "costs")
        costs.touch()
        # or pytest would take a folder above this checkout and the file of costs for the root, and begin names there
        plugin = ["-p", "tests.costs", "--costs", str(costs), "--rootdir", str(ROOT)]
        words = [*plugin, "-n", "2", "--dist", "loadgroup", "-m", "not gpu", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if given.lines:
            env["PYTHONPATH"] = f"{OURS}:{ROOT}"
            env["COVERAGE_PROCESS_START"] = str(OURS / "coveragerc")
            env["COVERAGE_FILE"] = f"{folder}/lines"
            env["HPCLM_CURRENT_TEST"] = f"{folder}/current"
        code = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=env, check=False).returncode
        if given.lines:
            combine = [sys.executable, "-m", "coverage", "combine", "-q", "--rcfile", str(OURS / "coveragerc")]
            subprocess.run([*combine, f"--data-file={folder}/lines", folder], cwd=ROOT, check=True)
            shutil.move(Path(folder, "lines"), ROOT / ".test-lines")
            shutil.copy(costs, ROOT / ".test-lines.costs")
        written(costs.read_text().splitlines())
    return code


if __name__ == "__main__":
    sys.exit(main())
