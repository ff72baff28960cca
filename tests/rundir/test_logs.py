import threading

import pytest

from hpclm.rundir import logs as following
from hpclm.rundir.logs import follow, last
from tests.runs import PATIENCE, until


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
