"""Which tests are in which size: the rule, and the lists that it reads."""

from types import SimpleNamespace

import pytest

from tests import sizes


@pytest.mark.parametrize("marks, size", [("whole", "more"), ("not gpu", "whole")])
def test_either_way_to_ask_for_the_whole_makes_all_rows_of_the_parity_table(marks, size):
    assert sizes.of_options(SimpleNamespace(option=SimpleNamespace(markexpr=marks, size=size))) == "whole"


def test_the_tests_that_notice_most_faults_for_their_cost_are_chosen_until_the_budget_is_spent():
    prices = {"many": 100.0, "cheap": 30.0, "dear": 60.0, "late": 20.0}
    assert sizes.of_faults({"many": 50, "cheap": 2, "dear": 3, "late": 1}, prices) == {"many", "cheap", "late"}


def test_every_test_that_costs_too_much_or_notices_a_fault_is_there(request):
    there = request.config.stash[sizes.COLLECTED]
    named = sizes.costs().keys() | sizes.tests_of_faults().keys()
    if {name.partition("::")[0] for name in named} <= {name.partition("::")[0] for name in there}:
        assert named <= there, "measure with tools/test_costs.py, or search with tools/mutations.py --search"
