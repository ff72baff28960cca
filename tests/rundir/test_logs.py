import threading

import pytest

from hpclm.rundir import logs as following
from hpclm.rundir.logs import follow, last, whole
from tests.runs import PATIENCE, until
from tests.work import calls


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(following, "ASK", 0.1)
    monkeypatch.setattr(following, "PAUSE", 0.02)


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_the_last_lines_are_those_of_tail(end, tmp_path):
    text = "\n".join(["", "one", "", "zwölf", "3"]) + end
    (tmp_path / "log").write_text(text)
    lines = [line.encode() + b"\n" for line in text.removesuffix("\n").split("\n")]
    for count in range(8):
        assert last(tmp_path / "log", count) == (lines[-count:] if count else [])


def test_the_last_lines_that_match_are_found_however_far_back(tmp_path):
    (tmp_path / "log").write_text("saved 1\n" + "step\n" * 10000 + "saved 2\n" + "step\n" * 10000)
    assert last(tmp_path / "log", 5, "^saved [12]$") == [b"saved 1\n", b"saved 2\n"]
    (tmp_path / "empty").touch()
    assert last(tmp_path / "empty", 5) == []


def holey(path, size, *written):
    """A file of ``size`` bytes, with holes but for what is written at some offsets."""
    with path.open("wb") as file:
        file.truncate(size)
        for offset, content in written:
            file.seek(offset)
            file.write(content)
    return path


def test_nul_bytes_are_counted_instead_of_printed_and_holes_are_not_read(tmp_path):
    """As after a power cut, in a file whose size was written and whose content was not."""
    large = holey(tmp_path / "log", 4 << 30, (0, b"first\nsec"), ((4 << 30) - 11, b"after\nlast\n"))
    assert list(whole(large)) == [b"first\n", b"sec", b"[4,294,967,276 NUL bytes are left out]after\n", b"last\n"]
    assert calls(lambda: list(whole(large))) < 100_000  # which it would be if it were read by megabytes
    assert last(large, 1) == [b"last\n"] and last(large, 1, "after") == [b"[268,435,445 NUL bytes are left out]after\n"]
    assert list(whole(holey(tmp_path / "log", 1 << 40))) == [b"[1,099,511,627,776 NUL bytes are left out]\n"]
    (tmp_path / "log").write_bytes(b"a\n" + bytes(3_000_000) + b"b" + bytes(3) + b"c" + bytes(40) + b"d\n" + bytes(2))
    assert list(whole(tmp_path / "log")) == [
        b"a\n",
        b"[3,000,000 NUL bytes are left out]b\0\0\0c[40 NUL bytes are left out]d\n",
        b"[2 NUL bytes are left out]\n",
    ]


def seen(path, act, lines=0, pattern=None):
    """What a follower sees while ``act(settled)`` writes; ``settled()`` waits until it has read all that there is."""
    over, asked, found = threading.Event(), [], []

    def ask():  # which it does when there is nothing to read
        asked.append(1)
        return over.is_set()

    def settled():
        before = len(asked)
        until(lambda: len(asked) >= before + 2, "the follower's next look")

    thread = threading.Thread(target=lambda: found.extend(follow(path, lines, pattern, ask)), daemon=True)
    thread.start()
    settled()
    act(settled)
    over.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return b"".join(found).decode()


def test_lines_are_followed_as_they_come(tmp_path, quick):
    path = tmp_path / "log"
    path.write_text("1\n2\n3\n")

    def grow(settled):
        with path.open("a") as file:
            for text in ("4\n", "fi", "ve\n6\n"):
                file.write(text)
                file.flush()
                settled()

    assert seen(path, grow, lines=2) == "2\n3\n4\nfive\n6\n"
    path.write_text("1\n2\n3\n")
    assert seen(path, grow, lines=9, pattern="[13i]") == "1\n3\nfive\n"


def test_a_missing_file_is_waited_for(tmp_path, quick):
    assert seen(tmp_path / "log", lambda _: (tmp_path / "log").write_text("1\n2")) == "1\n2"


def test_a_file_that_is_truncated_or_replaced_is_read_from_its_beginning(tmp_path, quick):
    path = tmp_path / "log"
    path.write_text("old, and long\n")

    def act(settled):
        path.write_text("new\n")
        settled()
        path.unlink()
        settled()
        path.write_text("newer, after a restart\n")

    assert seen(path, act) == "new\nnewer, after a restart\n"
