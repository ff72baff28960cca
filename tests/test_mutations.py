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


def test_the_table_has_every_fault_once():
    names = [fault["fault"] for fault in FAULTS]
    rows = [row[2:-2].split(" | ") for row in mutations.table(mutations.all_faults()).splitlines()[2:]]
    assert len({*names}) == len(names)
    assert sorted(f"{part}: {fault}" for part, faults in rows for fault in faults.split("; ")) == sorted(names)
