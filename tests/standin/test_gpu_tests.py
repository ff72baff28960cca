"""The tests that need a GPU, on a stand-in: memory and compilation where nothing is computed, the others where numbers are."""

import os
import subprocess

import pytest

from tests.runs import ROOT

pytestmark = pytest.mark.whole

UNCOMPUTED = ["test_the_planner_knows", "test_nothing_is_compiled_again"]
"""Tests of test_step.py that read no numbers: in full size."""
UNKNOWN = ["test_the_host_waits", "test_every_kernel_of_a_bf16_step"]
"""Tests that read the profiler's record of kernels, which the stand-in does not give; kernel_table.py counts waits instead."""
COMPILED = "compiled_step"
COMPUTED = " and ".join(f"not {name}" for name in [*UNCOMPUTED, *UNKNOWN]) + f" and not ({COMPILED})"


@pytest.mark.parametrize(
    "python, file, chosen",
    [
        ("python", "test_step.py", " or ".join(UNCOMPUTED)),
        ("python-computing", "test_step.py", COMPUTED),
        ("python-computing", "test_step.py", COMPILED),
        ("python-computing", "test_training.py", ""),
        ("python-computing", "test_checkpoints.py", ""),
    ],
)
def test_everything_that_needs_a_gpu_passes(python, file, chosen, lab):
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-W", "ignore", "--tb=short", f"tests/gpu/{file}"]
    done = subprocess.run(
        [lab / python, *words, "-k", chosen],
        cwd=ROOT,
        env=os.environ
        | ({"HPCLM_TEST_SHAPE": "cpu"} if python == "python-computing" else {})
        | ({"HPCLM_TEST_SHAPE": "interpreted", "COMPILE": "1"} if chosen == COMPILED else {}),
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


REHEARSED = {"test_experts.py", "test_several_ranks.py"}
"""Files that are rehearsed on a CPU instead (HPCLM_TEST_DEVICE=cpu)."""


def test_every_file_of_gpu_tests_is_run():
    files = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert files - REHEARSED == {"test_step.py", "test_training.py", "test_checkpoints.py"}
