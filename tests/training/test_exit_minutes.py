"""exit_minutes counts from the start of the processes, as Megatron's --exit-duration-in-mins does."""

import subprocess
import sys
import time

from hpclm import config
from hpclm.launch.process import in_this_process
from tests.events import began
from tests.runs import ROOT

IMPORTS = 3.0  # seconds that they take at least
CLOCK = 1.0  # seconds by which the start of a process may be wrong: Linux counts it from a boot time in whole seconds
SLOW = f"""
import sys, time
time.sleep({IMPORTS})
print(time.time(), flush=True)
from hpclm import cli
sys.exit(cli.main(sys.argv[1:]))
"""
SHORT = 1 / 60  # minutes: less than the imports take, however wrong the clock is


def attempt(out):
    [event] = began(out)
    return event


def test_imports_and_set_up_count(tiny, tmp_path):
    words = tiny("run", f"exit_minutes={SHORT}", "budget.steps=1000000")
    launched = time.time()
    done = subprocess.run(
        [sys.executable, "-c", SLOW, "train", *words], capture_output=True, text=True, cwd=ROOT, check=True
    )
    imported = float(done.stdout.splitlines()[0])
    assert "exit_minutes" in done.stderr
    assert '"loss"' not in (tmp_path / "run/metrics.jsonl").read_text()  # it was over before the first step
    assert launched - CLOCK - 0.1 <= attempt(tmp_path / "run")["began"] < imported - CLOCK


def test_of_a_run_inside_a_program_only_the_call_counts(tiny, tmp_path):
    called = time.time()
    in_this_process(config.from_cli(tiny("run", "budget.steps=2", "exit_minutes=1000")))
    assert called - 0.001 <= attempt(tmp_path / "run")["began"] <= time.time() + 0.001
