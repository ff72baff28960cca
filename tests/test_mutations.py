"""The faults that tools/mutations.py puts into the code fit the code as it is; whether tests notice them, only the tool can say."""

import ast
import sys

import pytest
import yaml

from tests.runs import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import mutations

FAULTS = yaml.safe_load((ROOT / "tools/mutations.yaml").read_text())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["fault"])
def test_a_fault_changes_one_place_and_leaves_python(fault):
    code = (ROOT / "hpclm" / fault["file"]).read_text()
    assert code.count(fault["old"]) == 1
    changed = code.replace(fault["old"], fault["new"])
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(code))


def test_the_page_lists_faults_by_their_names():
    names = [fault["fault"] for fault in FAULTS]
    assert len({*names}) == len(names) and mutations.listed() and {*mutations.listed()} <= {*names}
