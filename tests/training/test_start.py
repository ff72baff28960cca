"""The checks of a start: which run where, and that what they read is read once."""

import pytest

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.data import sources
from hpclm.training.start import CHECKS, HAS, SETTINGS, TRAINS, Check, RunStart


def start(out, *words, has=TRAINS):
    return RunStart(config.load(None, [f"out={out}", "budget.steps=5", *words]), has=has)


def test_checks_need_what_a_start_may_have_and_checks_before_them():
    known = {*HAS}
    for check in CHECKS:
        assert check.needs <= known and check.name not in known, check.name
        known.add(check.name)


def test_a_single_process_opens_its_data_once(tiny, monkeypatch):
    opened, build = [], sources.build_source
    monkeypatch.setattr(sources, "build_source", lambda *given: [opened.append(1), build(*given)][1])
    assert cli.main(["train", *tiny("run", "stop_at=1")]) == 0
    assert len(opened) == 1


@pytest.mark.parametrize("has, reads", [(SETTINGS, False), (TRAINS - {"dataset"}, False), (TRAINS, True)])
def test_a_check_is_left_out_where_a_start_lacks_what_it_needs(has, reads, tmp_path):
    checked = start(tmp_path / "run", "data.source=synthetic", has=has)
    checked.check()
    assert (checked.source is not None) == reads


def test_all_problems_are_told_and_a_check_that_needs_one_that_failed_is_left_out(tmp_path):
    (tmp_path / "run").touch()
    asked = []
    more = [Check("more", {"folder"}, lambda _: asked.append(1)), Check("else", set(), lambda _: ["this too"])]
    with pytest.raises(ConfigError) as error:
        start(tmp_path / "run", "data.prefix=nowhere", "data.split_by=tokens").check(more)
    assert [problem.partition(" ")[0] for problem in error.value.problems] == ["run", "dataset", "this"]
    assert not asked
