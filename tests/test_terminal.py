"""What a terminal is sent: nothing that a file, a name or a log says can steer it, and text stays readable."""

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpclm import cli
from hpclm.base import terminal
from tests.checkpoint import state
from tests.events import submit
from tests.rundir.test_runs import make
from tests.test_status import attempt

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egood\u2028\x7f漢字é"


def evil_run(folder_):
    """A run directory that says evil things wherever it may say something."""
    out = make(
        folder_ / f"run {EVIL}",
        [attempt(host="elsewhere")],
        log_txt=f"10:00:00 I run directory x a new run\n10:00:01 E {EVIL}\n",
    )
    made = state.store(out / "checkpoints", attempt={"engine": EVIL, "time": EVIL, "processes": EVIL})
    made.save(state.State(1.0), state.progress(1))
    bad = out / "checkpoints" / f".bad-step-00000002{EVIL}"
    bad.mkdir()
    (bad / "REASON.txt").write_text(f"{EVIL}\nand more\n")
    (out / "logs").mkdir()
    (out / "logs" / f"job-{EVIL}.log").write_text(EVIL)
    submit(out, "local", "1", "elsewhere", 1, 1, f"logs/job-{EVIL}.log")
    (out / "config.yaml").write_text(f'unknown: "{EVIL}"\n'.replace("\x1b", "\\e").replace("\x07", "\\a"))
    return out


@pytest.mark.parametrize(
    "verb",
    [
        "status OUT",
        "status --runs BELOW",
        "status OUT --json",
        "logs OUT",
        "logs OUT --job",
        "logs OUT --rank 3",
        "checkpoints OUT",
    ]
    + [
        "checkpoints OUT --json",
        "cancel OUT",
        "request OUT stop",
        "request OUT save",
        "resume OUT",
        "config OUT/config.yaml",
    ]
    + [
        "generate OUT --prompt x",
        "evaluate OUT",
        "convert OUT BELOW/to",
        "train OUT/config.yaml",
        "submit OUT/config.yaml",
    ]
    + ["submit --exclude-bad OUT", "planner OUT/config.yaml", "data inspect OUT/x"],
)
def test_nothing_that_a_run_directory_says_reaches_a_terminal_as_a_command(verb, tmp_path, capfdbinary):
    out = evil_run(tmp_path)
    words = [word.replace("OUT", str(out)).replace("BELOW", str(tmp_path)) for word in verb.split()]
    with contextlib.suppress(SystemExit):
        cli.main(words)
    said = b"".join(capfdbinary.readouterr()).decode()
    assert not terminal._HIDDEN.search(said.replace("\x7f", "") if "--json" in verb else said), said
    if "status" in verb and "--json" not in verb:
        assert "漢字é" in said and r"\x1b]0;owned" in said


def test_text_of_all_scripts_stays_as_it_is():
    text = "Straße, 漢字, हिन्दी, עברית, \U0001f600, a\tb\nc"
    assert terminal.plain(text) == text
    assert terminal.line(text) == text.replace("\n", r"\n")
    assert terminal.plain(os.fsdecode(b"caf\xe9 \x9b")) == r"caf\xe9 \x9b"


@given(st.text(), st.integers(1, 5))
def test_parts_of_a_file_come_out_as_the_whole_would(text, size):
    raw = text.encode(errors="surrogatepass")
    parts = list(terminal.lines(raw[begin : begin + size] for begin in range(0, len(raw), size)))
    assert "\x1b" not in b"".join(parts).decode()
    if "\r" not in text:
        assert b"".join(parts).decode() == terminal.plain(raw.decode(errors="backslashreplace"))


def test_numbers_are_told_as_ranges_and_counts_as_words():
    assert [terminal.ranges(numbers) for numbers in ([5, 3, 1, 4], [1, 2, 4, 6, 7], [])] == [
        "1, 3-5",
        "1-2, 4, 6-7",
        "",
    ]
    assert [terminal.many(count, "document") for count in (0, 1, 2000)] == [
        "0 documents",
        "1 document",
        "2,000 documents",
    ]


def test_a_curve_is_a_bar_for_each_value_and_a_text_is_cut_at_its_columns():
    assert (
        terminal.sparkline(range(8)) == terminal.BARS
        and terminal.sparkline([5, 5]) == "▁▁"
        and terminal.sparkline([]) == ""
    )
    assert [terminal.shortened("abcd", width) for width in (4, 3)] == ["abcd", "ab…"]
    assert [terminal.shortened("中文字", width) for width in (6, 5, 4)] == ["中文字", "中文…", "中…"]
    assert terminal.columns([["a", "b"], ["中文", "c"]]) == ["a     b", "中文  c"]


def test_what_is_hidden_is_escaped_and_lines_are_kept_or_not():
    assert terminal.line("a\nb\x1b\udc80\u202e\tc") == r"a\nb\x1b\x80\u202e" + "\tc"
    assert terminal.plain("a\nb\x1b") == "a\nb\\x1b"
    assert b"".join(terminal.lines([b"a\r\n\xe4\xb8", b"\xad\xff\r"])) == "a\n中\\xff\\x0d".encode()
