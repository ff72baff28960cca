"""All runs on one screen: what it shows, and how much work that is."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path
from subprocess import Popen

import pytest
import wcwidth

from hpclm import cli
from hpclm.base import terminal
from hpclm.launch.jobs import States
from hpclm.reporting import run_table
from hpclm.reporting.run_table import TopScreen
from tests import runs
from tests.rundir.test_runs import make

ROWS = [{"step": n, "loss": 5 - n / 10, "step_seconds": 2.0, "tokens_per_second": 100.0} for n in range(1, 41)]
HOLDER = '{"host": "elsewhere", "pid": 5}'


def attempt(**more):
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_step": 0,
        "host": "elsewhere",
        "pid": 1,
        "steps": 40,
        **more,
    }


def test_a_loss_curve_is_a_bar_for_each_point():
    assert terminal.sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert terminal.sparkline([]) == "" and terminal.sparkline([2.0, 2.0]) == "▁▁"


def test_the_folder_is_named_with_an_option_as_for_other_verbs_or_without(tmp_path, capsys):
    make(tmp_path / "mine", [attempt()], ROWS)
    for words in (["--runs", tmp_path], [tmp_path]):
        assert cli.main(["top", "--once", *map(str, words)]) == 0
        assert "mine" in capsys.readouterr().out


def test_where_there_is_no_terminal_it_prints_plain_lines(tmp_path, capsys, monkeypatch):
    make(tmp_path / "runs" / "a", [attempt()], ROWS, ("done", "done at step 40, 40 samples", 0), lock="{}")
    make(tmp_path / "runs" / "b\x1b[31m", [attempt()], ROWS[:7], lock=HOLDER, lock_beat="1 1")
    assert cli.main(["top", str(tmp_path / "runs")]) == 0
    heads, running, done = capsys.readouterr().out.splitlines()
    assert heads.split()[:5] == ["RUN", "STATE", "STEP", "LOSS", "LOSS"] and "CURVE" in heads
    assert r"b\x1b[31m" in running and " running " in running and "█▇" in running and "▁" in running
    assert " done " in done and " 40/40 " in done and " 1.0000 " in done
    (tmp_path / "none").mkdir()
    assert cli.main(["top", str(tmp_path / "none")]) == 0
    assert f"no run in {tmp_path / 'none'}; name" in capsys.readouterr().out
    assert cli.main(["top", str(tmp_path / "none/none")]) == 64


def test_slurm_is_not_asked_at_every_look(tmp_path, monkeypatch):
    (tmp_path / "squeue").write_text(f"#!/bin/bash\necho asked >> {tmp_path}/asked\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = make(tmp_path / "runs" / "a", [attempt(job_id="7")], ROWS[:5])
    watch = TopScreen(tmp_path / "runs", States(runs.PATIENCE).of)
    first = run_table.live_row(watch.look()[0])
    assert run_table.live_row(watch.look()[0]) == first and (tmp_path / "asked").read_text() == "asked\n"
    make(run, [attempt(job_id="7"), attempt(job_id="8")], ROWS)
    assert run_table.live_row(watch.look()[0])[4] != first[4] and (tmp_path / "asked").read_text() == "asked\n" * 2


@pytest.mark.parametrize("by", ["q", "Ctrl-C"])
def test_on_a_terminal_it_is_live_and_shows_no_keys_until_q_or_ctrl_c(by, tmp_path):
    make(tmp_path / "runs" / "a", [attempt()], ROWS[:7], lock=HOLDER, lock_beat="1 1")
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(runs.ROOT)}
    command = [sys.executable, "-m", "hpclm", "top", "--every", "0.2"]
    said, until = b"", time.monotonic() + runs.PATIENCE

    def wait_for(word):
        nonlocal said
        while word not in said:
            assert select.select([outer], [], [], max(0.0, until - time.monotonic()))[0], said[-2000:]
            said += os.read(outer, 1 << 16)

    with Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env=env, cwd=tmp_path, start_new_session=True
    ) as process:
        try:
            os.close(inner)
            wait_for(b"runs/a")
            make(tmp_path / "runs" / "b", [attempt()], ROWS[:3])
            wait_for(b"runs/b")
            assert not termios.tcgetattr(outer)[3] & termios.ECHO
            os.write(outer, b"q") if by == "q" else process.send_signal(signal.SIGINT)
            assert process.wait(runs.PATIENCE) == 0
            assert termios.tcgetattr(outer)[3] & termios.ECHO
        finally:
            process.kill()
    os.close(outer)
    assert b"1 running" in said and "█".encode() in said


def test_what_does_not_fit_on_the_screen_is_counted(tmp_path):
    for number in range(20):
        make(tmp_path / str(number), [attempt()], ROWS[:7])
    lines = TopScreen(tmp_path, States(runs.PATIENCE).of).screen(200, 10)
    assert len(lines) == 10 and lines[-1] == "and 14 more"


@pytest.mark.parametrize("width, points", [(60, 14), (80, 13), (120, 13), (200, 30)])
def test_names_and_states_stay_whole_however_narrow_the_terminal_is(width, points, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["runs/gpt2-124m", "runs/中文模型"]
    make(Path(names[0]), [attempt()], ROWS[:30], lock=HOLDER, lock_beat="1 1")
    make(
        Path(names[1]),
        [attempt()],
        ROWS,
        ("failed", "step 40: the loss is too high, lower optim.lr " * 3, 1),
        lock="{}",
    )
    watch = TopScreen(Path("runs"), States(runs.PATIENCE).of)
    live, table = watch.screen(width, 24), [*run_table.table(watch.look(), width)]
    for lines in (live[2:], watch.lines(watch.look(), width), table):
        assert max(map(wcwidth.width, lines)) <= width
        head = next(line for line in lines if line.startswith("RUN"))
        for name, state in zip(names, ("running", "failed"), strict=True):
            [line] = [line for line in lines if line.startswith(f"{name} ")]
            assert wcwidth.width(line[: line.index(state)]) == head.index("STATE")
    assert "LOSS CURVE" in live[2] and ("CHECKPOINT" in live[2]) == (width >= 120)
    curve = live[3].split()[4]
    assert curve[0] == "█" and curve[-1] == "▁" and len(curve) == points
    assert "".join(line.strip() for line in table[2:]).count("lower optim.lr") == 3
    make(Path(f"runs/{'long-' * 20}"), [attempt()], ROWS[:3], ("stopped", "stopped at step 3", 0), lock="{}")
    lines = [*run_table.table(watch.look(), 60)]
    after = lines[lines.index(f"runs/{'long-' * 20}") + 1]  # only this name has a line of its own
    assert after.index("stopped") == lines[0].index("STATE")
    assert any(re.match(r"runs/gpt2-124m +running +30/40 ", line) for line in lines)
