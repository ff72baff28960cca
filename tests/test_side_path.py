"""What training can do without: it may fail, is said to once, and is tried again."""

import pytest

from hpclm.base import side_path
from hpclm.base.side_path import AppendedFile, SidePath, cause


def failing():
    raise OSError(28, "No space left on device", "/d/x")


def test_the_first_of_several_failures_is_logged_and_tries_come_less_and_less_often(caplog):
    path, pauses = SidePath("/d/x cannot be written"), []
    for _ in range(8):
        assert not path.attempt(failing, now=True)
        pauses.append(path._pause)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert caplog.messages == ["/d/x cannot be written: No space left on device; training continues"]
    assert not path.attempt(lambda: pytest.fail("it is tried during the pause"))
    assert path.attempt(lambda: None, now=True) and path.attempt(lambda: None)
    assert not path.attempt(failing) and (path._pause, len(caplog.messages)) == (1, 2)


@pytest.mark.parametrize(
    "error, said, text",
    [
        (OSError(28, "Full", "/d/x"), "/d/x cannot be written", "Full"),
        (OSError(28, "Full", "/d/x"), "no chart", "/d/x: Full"),
        (OSError(28, "Full"), "", "Full"),
        (ValueError("one\ntwo"), "", "ValueError: one"),
        (ValueError(), "", "ValueError"),
    ],
)
def test_an_error_is_told_in_a_line_without_the_file_that_is_named_already(error, said, text):
    assert cause(error, said) == text


def test_what_cannot_be_written_is_kept_up_to_its_newest_bytes_and_a_file_that_was_removed_is_made_anew(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(side_path, "KEPT", 4)
    file = AppendedFile(tmp_path / "folder/x")
    with pytest.raises(FileNotFoundError):
        file.write("abc\ndef")
    (tmp_path / "folder").mkdir()
    file.flush()
    assert (tmp_path / "folder/x").read_text() == "\ndef"
    (tmp_path / "folder/x").unlink()
    file.write("ghi\n")
    file.close()
    assert (tmp_path / "folder/x").read_text() == "ghi\n"
