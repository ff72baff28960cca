"""The debug run: what it changes, what it finds, and the debugger."""

import json
import os
import pty
import subprocess
import sys

import pytest

from hpclm import config
from hpclm.config.data import SOURCES
from hpclm.launch import debug
from tests.forks import hpclm
from tests.runs import PATIENCE, ROOT, shown_on


def value(settings, key):
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_every_preset_can_be_debugged_without_its_data(preset):
    words = ["data.prefix=nowhere/x"] if config.load(preset).missing() else []
    settings = config.load(preset, words)
    changed = config.load(preset, [*words, *debug.overrides(settings)])
    assert changed.out == settings.out + "-debug" and changed.stop_at == 5
    assert not changed.engine.compile and changed.data.workers == 0 and changed.log.every == 1
    assert changed.data.source == "synthetic" and not changed.missing() and changed.model == settings.model
    assert changed.batch.global_size == 2 * changed.batch.micro_size <= 4 and not changed.checkpoint.every
    assert debug.overrides(changed)[0].startswith("out=") and len(debug.overrides(changed)) == 1


def test_only_what_changes_is_told():
    words = debug.overrides(config.load("debug", ["stop_at=2", "data.workers=0", "engine.compile=false"]))
    assert "stop_at=2" not in words and not any(word.startswith(("data.", "engine.compile")) for word in words)
    assert "checkpoint.every=0" in words
    assert "stop_at=3" in debug.overrides(config.load("debug", ["budget.steps=3"]))  # later it would have no effect


def test_data_that_is_there_is_used(tmp_path):
    for end in (".bin", ".idx"):
        (tmp_path / f"x{end}").touch()
    here = config.load("gpt2-124m", [f"data.prefix={tmp_path / 'x'}"])
    assert not any(word.startswith("data.source") for word in debug.overrides(here))
    (tmp_path / "x.bin").unlink()
    assert "data.source=synthetic" in debug.overrides(here)
    own = config.load("gpt2-124m", ["data.source=my.module:source"])
    assert "data.source=synthetic" not in debug.overrides(own) and SOURCES


def test_a_debug_run_is_small_begins_anew_each_time_and_leaves_the_run_alone(tiny, tmp_path):
    words = tiny("run", "data.source=indexed", "data.prefix=nowhere/x", "evaluate.every=100")
    for _ in range(2):
        done = hpclm("submit", *words, "--debug", check=0)
        assert f"\n  out={tmp_path / 'run'}-debug\n" in done.stderr and "\n  data.source=synthetic\n" in done.stderr
        rows = [json.loads(row) for row in (tmp_path / "run-debug/metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5]
        assert [row["step"] for row in rows if "validation_loss" in row] == [5]
    assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "run-debug/checkpoints").glob("step-*")] == ["step-00000005"]


BROKEN = """
import torch
from hpclm.model.gpt import Block

class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")

class Nan(Block):
    def forward(self, x, layout):
        return Bad.apply(super().forward(x, layout))

class Raises(Block):
    def forward(self, x, layout):
        answer = 6 * 7
        raise RuntimeError("it broke")
"""


@pytest.fixture
def broken(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    return dict(os.environ, PYTHONPATH=f"{tmp_path}:{ROOT}")


def test_a_gradient_that_is_nan_is_found_where_it_was_made(tiny, broken):
    plain = hpclm("train", *tiny("plain", "model.block=broken:Nan", "budget.steps=2"), env=broken)
    assert plain.returncode == 0 and "BadBackward" not in plain.stderr  # steps are skipped, with no reason given
    done = hpclm("submit", *tiny("run", "model.block=broken:Nan"), "--debug", check=1, env=broken)
    assert "Function 'BadBackward' returned nan values" in done.stderr and "Bad.apply(super()" in done.stderr


def test_the_debugger_opens_where_it_broke_on_a_terminal(tiny, tmp_path, broken):
    words = [sys.executable, "-m", "hpclm", "submit", *tiny("run", "model.block=broken:Raises"), "--debug", "--pdb"]
    mine, theirs = pty.openpty()
    os.write(mine, b"p answer\nq\n")
    process = subprocess.Popen(words, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=broken)
    os.close(theirs)
    shown = shown_on(mine)
    os.close(mine)
    assert process.wait(timeout=PATIENCE) == 1
    assert b"RuntimeError: it broke" in shown and b"(Pdb) 42\r\n" in shown.replace(b"p answer\r\n", b"")


def test_without_a_terminal_there_is_a_traceback_and_no_debugger(tiny, broken):
    words = tiny("run", "model.block=broken:Raises")
    done = hpclm("submit", *words, "--debug", "--pdb", check=1, env=broken)
    assert "RuntimeError: it broke" in done.stderr and "--pdb needs a terminal" in done.stderr
