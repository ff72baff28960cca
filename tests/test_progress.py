"""Progress bars, on terminals of several widths."""

import fcntl
import os
import pty
import struct
import sys
import termios
from contextlib import suppress

import pytest
import wcwidth

from hpclm.base.progress import MIN_COLUMNS, ProgressBar

TOLD = ("loss 3.2134", "412,345 tokens/s", "MFU 45.1%", "lr 0.0006")


def shown(width, done, **options):
    """What a terminal ``width`` columns wide shows of a bar after ``done``."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, width, 0, 0))
    with os.fdopen(inner, "w") as file, ProgressBar(file=file, **options) as bar:
        bar.beside = TOLD
        bar.update(done)
    text = b""
    with suppress(OSError):  # its end
        while more := os.read(outer, 1 << 16):
            text += more
    os.close(outer)
    return text.decode().strip().split("\r")[-1]


@pytest.mark.parametrize("width, parts", [(60, 1), (80, 2), (120, 4), (200, 4)])
def test_the_bar_stays_a_bar_and_the_most_important_is_told_beside_it(width, parts):
    line = shown(width, 1000, total=2000, desc="step ", unit="")
    assert wcwidth.width(line) <= width and line.startswith("step 1000/2000 ") and " left" in line
    assert line.count("█") >= MIN_COLUMNS // 2 and [part for part in TOLD if part in line] == [*TOLD[:parts]]


def test_without_a_known_end_there_is_a_count(capfd):
    assert shown(80, 7, total=None, desc="step ", unit="").startswith("step 7  00:00  loss 3.2134  412,345 tokens/s")
    assert shown(80, 5000, total=24000, desc="模型: ", unit="B", unit_scale=True).startswith("模型: 5.00k/24.0kB █")
    with ProgressBar(10) as bar:
        bar.update()
    assert capfd.readouterr().err == ""


def test_a_process_without_a_standard_error_has_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with ProgressBar(2) as bar:
        bar.update()
