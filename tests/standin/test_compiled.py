"""Steps compiled for a GPU that is not there: no graph breaks, nothing compiled again, no waiting, memory as the planner says."""

import sys

import pytest

from tests.runs import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import kernel_table

pytestmark = pytest.mark.whole
WAIT = ("deepspeed", "fairscale")
"""Engines whose library waits for the GPU in a step."""
PLANNED_FOR_MORE = ("deepspeed 3", "deepspeed 2, offload")
"""What the planner takes for too much with one replica: docs/benchmarks.md."""


@pytest.mark.parametrize("name", kernel_table.CASES)
def test_a_step_compiles_once_and_waits_for_nothing(name, lab):
    found = kernel_table.run_case(str(lab / "python"), kernel_table.CASES[name])
    assert found["recompiled"] == 0
    assert found["breaks"] == 0
    assert found["compiled"] == bool(found["graphs"]) or not found["compiled"]
    assert found["kernels"] or not found["compiled"]
    if not name.split(", ")[1].startswith(WAIT) and "fp16" not in name:
        assert not found["waits"]
    if not name.partition(", ")[2].startswith(PLANNED_FOR_MORE):
        assert found["planner"] == pytest.approx(found["peak"], rel=0.03)
