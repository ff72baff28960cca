"""How far preprocessing is, on a terminal and in a log."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

import pytest

from tests.preprocess.texts import COMMAND, write
from tests.runs import shown_on

WORDS = ["--input", "a.txt", "--output-prefix", "x", "--tokenizer", "bytes"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(**{"a.txt": "a line of text\n" * 200_000})


def test_a_terminal_shows_a_bar_with_bytes_the_time_left_and_tokens_a_second():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 140, 0, 0))
    with subprocess.Popen([*COMMAND, *WORDS], stderr=theirs, stdout=subprocess.DEVNULL):
        os.close(theirs)
        shown = shown_on(ours)
    os.close(ours)
    assert re.search(r"x_text_document: 3\.00M/3\.00MB █{10,}\S* \d+:\d\d left  [\d,]+ tokens/s", shown.decode())


def test_a_short_run_logs_nothing():
    assert subprocess.run([*COMMAND, *WORDS], capture_output=True, text=True, check=True).stderr == ""
