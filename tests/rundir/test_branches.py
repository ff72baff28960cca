"""Runs as a tree of branches, whatever has become of their trunks."""

from pathlib import Path

import pytest

from hpclm.rundir import branches
from hpclm.rundir.branches import Trunk
from hpclm.rundir.runs import read_run
from tests.events import note
from tests.rundir.test_runs import make


@pytest.mark.parametrize(
    "trunks, shown",
    [
        ({"a": None, "b": None}, "a b"),
        ({"0": "b", "a": None, "b": "a", "c": None, "d": "a"}, "a +b ++0 +d c"),
        ({"b": "gone", "c": "b"}, "b +c"),
        ({"a": "b", "b": "a", "c": "a"}, "+b +a ++c"),  # b was removed, and made again as a branch of its branch
        ({"a": "a"}, "a"),
        ({}, ""),
    ],
)
def test_each_branch_follows_its_trunk(trunks, shown, tmp_path):
    runs = [(tmp_path / run, trunk and Trunk(tmp_path / trunk, 4)) for run, trunk in trunks.items()]
    names = [*trunks]
    assert " ".join("+" * depth + names[place] for place, depth in branches.tree(runs)) == shown


def test_a_trunk_is_found_through_links_and_said_to_be_gone_when_it_is(tmp_path):
    trunk, branch = make(tmp_path / "a"), make(tmp_path / "b")
    (tmp_path / "link").symlink_to("a")
    note(branch, "branched", trunk=str(tmp_path / "link"), step=4)
    found = read_run(branch).trunk
    assert found == Trunk(tmp_path / "link", 4) and read_run(trunk).trunk is None
    assert found.described() == f"{tmp_path}/link at step 4"
    assert found.described({str(trunk): "a"}) == "a at step 4"
    assert branches.tree([(branch, found), (trunk, None)]) == [(1, 0), (0, 1)]
    assert Trunk(Path("/proc/1/root/x"), 2).described().startswith("/proc/1/root/x at step 2")
    (tmp_path / "link").unlink()
    assert found.described() == f"{tmp_path}/link at step 4, which is no longer there"
