"""Files that are read, written and swept safely."""

import os
import time

import pytest

from hpclm.base import files


def test_a_file_whose_size_is_not_known_before_is_refused_as_too_large_too(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "x", 5) == b"12345"
    for path in (tmp_path / "x", "/proc/self/status"):
        with pytest.raises(files.Unfit, match=r"larger than 0\.0 MB, the limit"):
            files.read_bytes(path, 4)
    assert files.too_large("x", 2_500_000).strerror == "larger than 2.5 MB, the limit"


def test_unfinished_files_of_processes_that_have_ended_are_removed_and_those_of_other_machines_after_a_day(tmp_path):
    mine = files.aside(tmp_path / "x")
    ended = tmp_path / f"x.tmp-{files.here()}-{2**22 + 1}-abcdef"  # beyond the highest number of a process
    fresh, old = tmp_path / "x.tmp-elsewhere-1-a", tmp_path / "x.tmp-elsewhere-1-b"
    for path, hours in ((mine, 30), (ended, 0), (fresh, 23), (old, 25), (tmp_path / "y.tmp-elsewhere-1-c", 25)):
        path.touch()
        os.utime(path, (time.time() - hours * 3600,) * 2)
    files.sweep(tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, fresh.name, "y.tmp-elsewhere-1-c"}


def test_a_machine_is_a_kernel_with_a_network_and_processes():
    assert (files.kernel_of("a-b-c"), files.network_of("a-b-c")) == ("a", "a-b") and files.here().count("-") == 2


@pytest.mark.parametrize(
    "path, shown, typed",
    [("a b", "a b", "'a b'"), ("-x", "./-x", "./-x"), ("~x", "./~x", "'./~x'"), ("/a", "/a", "/a")],
)
def test_a_path_for_people_is_never_taken_for_an_option_or_a_home_folder(path, shown, typed):
    assert (files.shown(path), files.typed(path)) == (shown, typed)


def test_a_fingerprint_is_of_every_byte_of_a_short_file_and_of_both_ends_of_a_long_one(monkeypatch):
    monkeypatch.setattr(files, "HASHED", 4)
    monkeypatch.setattr(files, "FINGERPRINT_BLOCKS", 3)

    def noticed(size):
        """The places whose change shows."""
        content = bytes(size)
        changes = (content[:place] + b"x" + content[place + 1 :] for place in range(size))
        return [
            place for place, changed in enumerate(changes) if files.fingerprint(changed) != files.fingerprint(content)
        ]

    assert noticed(12) == [*range(12)]
    assert noticed(20) == [*range(4), *range(8, 12), *range(16, 20)]


def test_a_file_that_is_overwritten_has_nothing_of_its_longer_text_left(tmp_path):
    for text in ("a longer text", "x"):
        files.overwrite(tmp_path / "x", text)
    assert (tmp_path / "x").read_text() == "x"
    files.append(tmp_path / "x", "y")
    assert (tmp_path / "x").read_text() == "xy"
