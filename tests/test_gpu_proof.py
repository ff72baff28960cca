"""tools/gpu_proof.sh, which needs a GPU, as far as it can be tried without one."""

import json
import subprocess
import sys

import pytest
import torch

from tests.runs import ROOT


def proof(*words, **more):
    return subprocess.run(
        [ROOT / "tools/gpu_proof.sh", *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=600, **more
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_nothing_that_looks_like_a_result(tmp_path):
    done = proof("--out", tmp_path / "out")
    assert done.returncode == 64 and "finds no GPU here; --device cpu rehearses without one" in done.stderr
    assert not (tmp_path / "out/report.md").exists()


def test_there_are_many_tests_that_only_a_gpu_can_pass():
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests/gpu"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    assert (
        found.count("::")
        + sum(int(n) for n in [line.rpartition(": ")[2] for line in found.splitlines()] if n.isdigit())
        >= 40
    )


@pytest.mark.whole
def test_a_rehearsal_that_is_out_of_time_goes_on_in_the_next_call(tmp_path):
    first = proof("--device", "cpu", "--out", tmp_path, "--minutes", "0.05")
    assert first.returncode == 1 and "not begun" in first.stdout
    done = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert "limits" in done and "profile" not in done
    second = proof("--device", "cpu", "--out", tmp_path)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "== limits" not in second.stdout and "== profile" in second.stdout
    report = (tmp_path / "report.md").read_text()
    assert "a rehearsal" in report and "| hpclm |" in report and "host waits" in report
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
