"""Steps compiled for a GPU that is not there: no graph breaks, nothing compiled again, no waiting, memory as the planner says."""

import sys

import pytest

from tests.runs import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import kernel_table

pytestmark = pytest.mark.whole
WAIT = {"deepspeed 1", "deepspeed 3", "fairscale"}
"""Engines whose library waits for the GPU in a step."""


@pytest.mark.parametrize("name", kernel_table.CASES)
def test_a_step_compiles_once_and_waits_for_nothing(name, lab):
    found = kernel_table.run_case(str(lab / "python"), kernel_table.CASES[name])
    assert found["recompiled"] == 0
    assert found["breaks"] == 0
    assert found["compiled"] == bool(found["graphs"]) or not found["compiled"]
    assert found["kernels"] or not found["compiled"]
    if name.split(", ")[1] not in WAIT and "fp16" not in name:
        assert not found["waits"]
