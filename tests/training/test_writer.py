"""The thread that writes metrics: in order, complete where it must be, and an error ends the run."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from hpclm import cli
from hpclm.checkpoint import store as stores
from hpclm.training import metrics, session, writer
from hpclm.training.control import ControlSync
from hpclm.training.writer import WriterThread
from tests.runs import PATIENCE, lines, losses, until


def test_work_is_done_in_order_by_another_thread_and_flush_waits_for_it():
    done = []

    def work(number):
        time.sleep(0.001)
        done.append((number, threading.current_thread().name))

    with WriterThread() as write:
        for number in range(20):
            write(lambda number=number: work(number))
        write.flush()
        assert done == [(number, "metrics") for number in range(20)]
        write(lambda: work(20))
    assert done[-1][0] == 20


def test_more_work_than_may_wait_waits(monkeypatch):
    monkeypatch.setattr(writer, "MAX_WAITING", 2)
    door, given = threading.Event(), []
    with WriterThread() as write:

        def give():
            for number in range(5):
                write(door.wait)
                given.append(number)

        giver = threading.Thread(target=give)
        giver.start()
        until(lambda: len(given) == 3, "the third piece of work")
        giver.join(0.3)
        assert len(given) == 3  # one that is done, and two that wait
        door.set()
        giver.join()


@pytest.mark.parametrize("told", ["call", "flush", "end"])
def test_an_error_reaches_the_thread_that_gave_the_work(told):
    done = []
    with pytest.raises(ZeroDivisionError), WriterThread() as write:
        write(lambda: 1 / 0)
        write(lambda: done.append(1))
        if told == "flush":
            write.flush()
        while told == "call":
            write(lambda: done.append(2))
    assert not done


def test_an_error_of_the_block_is_not_hidden():
    with pytest.raises(KeyError), WriterThread() as write:
        write(lambda: 1 / 0)
        raise KeyError


def test_an_error_of_the_thread_ends_the_run(tiny, tmp_path, monkeypatch, capsys):
    def broken(row):
        raise RuntimeError(f"no words for step {row.rows[-1]['step']}")

    monkeypatch.setattr(metrics.log_lines, "step_line", broken)
    assert cli.main(["train", *tiny("run", "checkpoint.every=0")]) not in (0, 85)
    assert "RuntimeError: no words for step 1" in capsys.readouterr().err
    assert len(lines(tmp_path / "run/metrics.jsonl")) < 12


@pytest.mark.parametrize("background", ["true", "false"])
def test_all_steps_of_a_checkpoint_are_on_the_disk_before_it_is_there(background, tiny, tmp_path, monkeypatch):
    """With a thread that is slow to write them."""
    write, publish, found = metrics.Meter._write, stores.directory.publish, {}
    synced = []
    fsync = os.fsync

    def slow(self, row, *more):
        time.sleep(0.02)
        write(self, row, *more)

    def looked_at(staged, final):
        steps = [json.loads(line)["step"] for line in lines(tmp_path / "run/metrics.jsonl")]
        found[int(final.name[5:])] = steps, synced[-1]
        publish(staged, final)

    def noted(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.name == "metrics.jsonl":
            synced.append(len(lines(tmp_path / "run/metrics.jsonl")))
        fsync(handle)

    monkeypatch.setattr(metrics.Meter, "_write", slow)
    monkeypatch.setattr(stores.directory, "publish", looked_at)
    monkeypatch.setattr(os, "fsync", noted)
    words = tiny("run", "checkpoint.every=3", f"checkpoint.background={background}", "evaluate.every=0")
    assert cli.main(["train", *words]) == 0
    assert found.keys() == {3, 6, 9, 12}
    for step, (steps, there) in found.items():
        assert steps[:step] == list(range(1, step + 1)) and there >= step


def test_an_evaluation_asks_the_ranks_no_more_often_than_is_due(tiny, tmp_path, monkeypatch):
    """Each has 40 micro-batches, which take no longer than the time between two questions."""
    monkeypatch.setattr(session, "POLL_SECONDS", PATIENCE)
    asked = []
    poll = ControlSync.poll
    monkeypatch.setattr(ControlSync, "poll", lambda self: [asked.append(1), poll(self)][1])
    quiet = ["budget.steps=8", "checkpoint.every=0", "checkpoint.grace_seconds=1000"]
    assert cli.main(["train", *tiny("plain", *quiet, "evaluate.every=0")]) == 0
    plain, asked[:] = len(asked), []
    assert cli.main(["train", *tiny("run", *quiet, "evaluate.every=4", "evaluate.batches=20")]) == 0
    assert plain <= 5 and len(asked) <= plain + 8
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
