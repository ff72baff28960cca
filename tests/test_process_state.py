"""A program that calls hpclm's functions finds its process as it was."""

import json
import subprocess
import sys

from tests.runs import PATIENCE, ROOT


def test_every_function_leaves_the_process_of_its_caller_as_it_was_and_computes_as_in_a_new_one(tmp_path):
    command = [sys.executable, "-m", "tests.process_snapshot", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert {name: changed for name, changed in results["changes"].items() if changed} == {}
    assert results["raised"] == {"refused": "ConfigError", "diverged": "DivergedError", "interrupted": "Interrupted"}
    losses = results["losses"]
    assert losses["a"][:5] == losses["c"] == losses["d"] and None not in losses["a"][:4]
