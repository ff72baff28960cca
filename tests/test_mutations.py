"""The faults that tools/mutations.py puts into the code fit the code as it is; whether tests notice them, only the tool can say."""

import ast

import pytest
import yaml

from tests.runs import ROOT

FAULTS = yaml.safe_load((ROOT / "tools/mutations.yaml").read_text())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["fault"])
def test_a_fault_changes_one_place_and_leaves_python(fault):
    code = (ROOT / "hpclm" / fault["file"]).read_text()
    assert code.count(fault["old"]) == 1
    changed = code.replace(fault["old"], fault["new"])
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(code))


def test_the_table_is_of_these_faults_and_each_in_it_was_caught():
    names = [fault["fault"] for fault in FAULTS]
    rows = (ROOT / "docs/mutations.md").read_text().partition("|---|---|\n")[2].splitlines()
    tried, caught = zip(*(row.strip("| ").split(" | ") for row in rows))
    assert [name for name in names if name in tried] == list(tried) and len(set(names)) == len(names)
    assert all(test.startswith("`") for test in caught)
