"""How an attempt's end reaches the processes of its sinks, which are a shell's here."""

import subprocess

import pytest

from hpclm.node import python
from hpclm.sinks import process
from hpclm.sinks.process import Sinks
from tests.runs import PATIENCE


def test_a_sink_hears_how_the_attempt_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "FAILED", PATIENCE)
    monkeypatch.setattr(process, "SECONDS", {})
    monkeypatch.setattr(python, "command", lambda _, name, out: ["sh", "-c", 'cat > "$0"', f"{out}/{name}"])
    with Sinks(["good"], tmp_path) as sinks:
        sinks.start()
        sinks.code = 85
    with pytest.raises(ValueError), Sinks(["failed"], tmp_path) as sinks:
        sinks.start()
        raise ValueError
    assert [(tmp_path / name).read_text() for name in ("good", "failed")] == ["85", "1"]


def test_all_sinks_together_have_the_time_of_one(tmp_path, monkeypatch):
    allowed = []

    class Noted(subprocess.Popen):
        def wait(self, timeout=None):
            allowed.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(python, "command", lambda *_: ["sleep", "3600"])
    monkeypatch.setattr(process, "SECONDS", {0: 0.05})
    with Sinks(["one", "two"], tmp_path) as sinks:
        sinks.start()
    assert allowed[0] <= 0.05 and allowed[1:] == [None, 0.0, None]  # each is killed, and waited for
