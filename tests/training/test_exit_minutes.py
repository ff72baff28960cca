"""exit_minutes counts from the start of the processes, as Megatron's --exit-duration-in-mins does."""

import json
import subprocess
import sys
import time

import psutil

from hpclm import config
from hpclm.commands.train import in_this_process
from tests.runs import ROOT

SHORT = 0.005  # minutes: less than Python takes to import PyTorch, and more than from then to the first step


def attempt(out):
    return json.loads((out / "attempts.jsonl").read_text())


def test_imports_and_set_up_count(tiny, tmp_path):
    words = tiny("run", f"exit_minutes={SHORT}", "budget.steps=1000000")
    process = subprocess.Popen(
        [sys.executable, "-m", "hpclm", "train", *words], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    started = psutil.Process(process.pid).create_time()
    shown = process.communicate()[1]
    assert process.returncode == 0 and "exit_minutes" in shown
    assert '"loss"' not in (tmp_path / "run/metrics.jsonl").read_text()  # it was over before the first step
    assert abs(attempt(tmp_path / "run")["began"] - started) < 0.5  # not when it had imported PyTorch


def test_of_a_run_inside_a_program_only_the_call_counts(tiny, tmp_path):
    called = time.time()
    in_this_process(config.from_cli(tiny("run", "budget.steps=2", "exit_minutes=1000")))
    assert psutil.Process().create_time() < called <= attempt(tmp_path / "run")["began"] + 0.001
