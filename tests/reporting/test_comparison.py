"""What runs are called beside each other."""

from pathlib import Path

from hpclm.reporting import comparison


def test_folders_of_the_same_name_are_told_apart_by_those_above_them():
    assert comparison.names([Path("/a/run"), Path("/a/other")]) == ["run", "other"]
    assert comparison.names([Path("/a/b/run"), Path("/a/c/run"), Path("/a/c/other")]) == ["b/run", "c/run", "c/other"]
