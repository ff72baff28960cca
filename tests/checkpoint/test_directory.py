"""The folder of checkpoints: what is swept, put back, and said of what cannot be used."""

import shutil

import pytest

from hpclm.base.errors import ConfigError, HpclmError, NoCheckpointError
from hpclm.checkpoint import directory
from hpclm.checkpoint.manifest import BadCheckpoint
from tests.checkpoint.state import saved


def test_an_attempt_sweeps_what_it_and_earlier_ones_were_writing_and_nothing_of_a_later_one(tmp_path):
    for name in (".tmp-step-00000001", *(f".tmp-step-00000001-g{n}" for n in (1, 2, 3)), ".trash-step-00000001"):
        (tmp_path / name).mkdir()
    directory.sweep(tmp_path, 2)
    assert directory.names(tmp_path) == [".tmp-step-00000001-g3"]


def test_what_was_replaced_comes_back_where_its_name_is_free_and_goes_where_it_is_taken(tmp_path):
    for name in (".old-step-00000001", ".old-step-00000002", "step-00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    directory.restore(tmp_path)
    assert directory.names(tmp_path) == ["step-00000001", "step-00000002"]
    assert [(tmp_path / name / "x").read_text() for name in directory.names(tmp_path)] == [
        ".old-step-00000001",
        "step-00000002",
    ]


def test_a_checkpoint_stays_if_what_should_replace_it_is_gone(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(FileNotFoundError):
        directory.publish(tmp_path / ".tmp-step-00000001", tmp_path / "step-00000001")
    assert directory.names(tmp_path) == ["step-00000001"]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for step in (1_000_000_000, 5, 200_000_000):
        (tmp_path / f"step-{step:08d}").mkdir()
    assert [int(path.name[5:]) for path in directory.steps(tmp_path)] == [5, 200_000_000, 1_000_000_000]


def test_a_file_in_place_of_the_folder_is_refused_and_no_disk_is_blamed(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(
        ConfigError, match="checkpoints cannot be read: Not a directory; check the path and its permissions"
    ):
        directory.names(tmp_path / "checkpoints")


def test_a_disk_that_fails_is_told_from_a_checkpoint_that_was_removed_meanwhile(tmp_path):
    saved(tmp_path, (1,))
    folder = tmp_path / "step-00000001"

    def failing(path, manifest):
        raise OSError(5, "Input/output error")

    def removing(path, manifest):
        shutil.rmtree(path)
        failing(path, manifest)

    with pytest.raises(HpclmError, match=r"step-00000001 cannot be read now: .*Input/output error; check the disk"):
        directory.checked(folder, failing)
    with pytest.raises(BadCheckpoint, match="it was removed"):
        directory.checked(folder, removing)


def test_a_bad_checkpoint_that_is_named_is_refused_with_the_reason_and_of_a_run_the_one_before_is_taken(tmp_path):
    saved(tmp_path / "checkpoints", (1, 2))
    bad = tmp_path / "checkpoints/step-00000002"
    (bad / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(NoCheckpointError, match=r"step-00000002 is bad: rank-00000\S+ has 0 bytes.*; choose another"):
        directory.locate(bad, directory.checked)
    assert directory.locate(tmp_path, directory.checked)[0].name == "step-00000001"
