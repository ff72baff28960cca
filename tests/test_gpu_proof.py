"""tools/gpu_proof.sh, which needs a GPU, as far as it can be tried without one."""

import json
import subprocess
import sys

import pytest
import torch

from tests.runs import PATIENCE, ROOT

sys.path.insert(0, str(ROOT / "tools"))
import gpu_proof


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
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE).stdout
    assert (
        found.count("::")
        + sum(int(n) for n in [line.rpartition(": ")[2] for line in found.splitlines()] if n.isdigit())
        >= 40
    )


def test_a_stage_that_fails_stops_no_other_and_is_tried_again(tmp_path, capsys):
    def stage(name, code):
        return gpu_proof.Stage(name, [sys.executable, "-c", code])

    fails = stage("fails", "print('FAILED tests/gpu/x.py::test_y'); raise SystemExit(3)")
    works = f"print('| a |\\nb is left out: c'); open(r'{tmp_path}/works.json', 'w').write('[1]')"
    known = {"facts": {}, "stages": {}}
    gpu_proof.work([fails, stage("works", works)], known, tmp_path, 1)
    report = (tmp_path / "report.md").read_text()
    assert "| fails | exit 3 |" in report and "- FAILED tests/gpu/x.py::test_y" in report
    assert "| works | done |" in report and "| a |\n\n- b is left out: c" in report
    assert json.loads((tmp_path / "results.json").read_text())["stages"]["works"]["figures"] == [1]
    capsys.readouterr()
    gpu_proof.work([stage("fails", "print('well')"), stage("works", "raise SystemExit(1)")], known, tmp_path, 1)
    assert capsys.readouterr().out.count("==") == 1  # what is done is not done again
    assert "| fails | done |" in (tmp_path / "report.md").read_text()
    assert "| works | done |" in gpu_proof.report(known, [])  # whatever is chosen now


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
