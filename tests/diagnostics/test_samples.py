import math

import pytest

from hpclm.diagnostics.samples import UPDATE_TOLERANCE, differing, sample
from hpclm.distributed.context import single


@pytest.mark.parametrize("loss, off", [(1.0001, False), (1.001, True), (math.inf, True), (math.nan, True)])
def test_a_value_that_is_far_off_or_no_number_differs(loss, off):
    right = {"loss of step 1": sample(1.0)}
    wrong, closest = differing({"loss of step 1": sample(loss)}, right, right, UPDATE_TOLERANCE, single())
    assert closest.startswith("loss of step 1 is off by ") and wrong == closest * off
