"""Folders that only this user can change."""

import os

import pytest

from hpclm.base import folders
from hpclm.base.errors import ConfigError


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    return tmp_path / "mine"


@pytest.mark.parametrize("mode, private", [(0o700, True), (0o755, True), (0o775, False), (0o757, False)])
def test_a_folder_is_private_where_nobody_else_can_write_and_it_is_no_link(mode, private, mine):
    mine.chmod(mode)
    assert folders.is_private_folder(mine) == private
    (mine.parent / "link").symlink_to(mine)
    assert not folders.is_private_folder(mine.parent / "link") and not folders.is_private_folder(mine / "none")


@pytest.mark.parametrize(
    "mode, sticky, said",
    [(0o755, False, None), (0o777, True, "(mode 0777; chmod go-w)"), (0o1777, False, "(mode 1777; chmod go-w)")],
)
def test_a_folder_that_others_can_write_to_is_exposed(mode, sticky, said, mine):
    mine.chmod(mode)
    for is_sticky in (sticky, False):
        found = folders.exposed_folder(mine, sticky=is_sticky)
        assert found == (said and f"folder {mine} can be written by others {said}")


def test_files_in_a_sticky_folder_are_not_replaced_by_others(mine):
    mine.chmod(0o1777)
    assert folders.exposed_folder(mine, sticky=True) is None
    (mine / "x").touch(mode=0o644)
    assert folders.exposed(mine / "x", (mine / "x").stat()) is None
    (mine / "x").chmod(0o666)
    assert (
        folders.exposed(mine / "x", (mine / "x").stat()) == f"{mine}/x can be written by others (mode 0666; chmod go-w)"
    )


def test_a_temporary_folder_of_ones_own_is_shared_unless_somebody_else_could_change_it(mine, monkeypatch, caplog):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(mine))
    first = folders.own_temporary("x")
    assert first == mine / f"x-{os.geteuid()}" == folders.own_temporary("x") and first.stat().st_mode & 0o777 == 0o700
    first.chmod(0o777)
    other = folders.own_temporary("x")
    assert (
        other != first
        and other.parent == mine
        and f"{first} was made by another user, or others can write to it" in caplog.text
    )
    mine.chmod(0o1777)
    assert folders.own_temporary("y").is_dir()
    mine.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"others could replace it there \(mode 0777\); set TMPDIR to your own folder"
    ):
        folders.own_temporary("x")


def test_temporary_folders_of_processes_that_have_ended_are_removed(mine, monkeypatch):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(mine))
    ended, here = mine / f"hpclm-{folders.here()}-{2**22 + 1}-abc", mine / f"hpclm-{folders.here()}-{os.getpid()}-abc"
    for folder in (ended, here, mine / "hpclm-elsewhere-1-abc"):
        folder.mkdir()
    with folders.temporary_folder() as made:
        assert {path.name for path in mine.iterdir()} == {here.name, "hpclm-elsewhere-1-abc", made.name}
    assert not made.exists()


def test_a_model_for_other_programs_is_no_run_directory(tmp_path):
    (tmp_path / "config.json").touch()
    assert folders.exported_model(tmp_path).endswith(f"make a run of it: hpclm convert {tmp_path} runs/base")
    assert folders.exported_model(tmp_path / "x.gguf").endswith(f"llama-cli -m {tmp_path}/x.gguf runs it")
    (tmp_path / "config.yaml").touch()
    assert folders.exported_model(tmp_path) == ""
