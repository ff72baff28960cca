"""One run directory, one run: the dead, the silent, the living, and those who do not know that they were given up."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from hpclm.base.errors import LockedError
from hpclm.checkpoint import directory
from hpclm.rundir import lease
from hpclm.rundir.lease import Lease
from tests import traced
from tests.checkpoint.state import State, progress, saved, store
from tests.rundir.holders import contend, hold, job, save_late, sign_off
from tests.runs import PATIENCE

needs_strace = pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace here")
ELSEWHERE = {"generation": 4, "host": "elsewhere", "pid": 1, "job": "9", "start": 0, "token": "x"}


def holding(folder, held_by):
    """A process that holds ``folder``."""
    process = traced.Traced(hold, folder, held_by, calls=None)
    process.go()
    word, process.tid = process._hear()
    assert word == "gate"
    return process


def taken(folder, **options):
    """The generation of a lease of ``folder``."""
    with Lease(folder, **options) as lease:
        return lease.generation


def test_the_lease_of_a_dead_process_is_taken_over_at_once_and_generations_only_grow(tmp_path, caplog):
    caplog.set_level("INFO")
    with holding(tmp_path, None) as process:
        with pytest.raises(LockedError, match=f"process {process.tid} on {socket.gethostname()}"), Lease(tmp_path):
            pass
        os.kill(process.tid, signal.SIGKILL)
        assert process.end().code == -9
    assert [taken(tmp_path) for _ in range(3)] == [2, 3, 4] and "waiting" not in caplog.text


def test_a_folder_that_is_held_is_refused_with_the_holder_and_free_again_afterwards(tmp_path):
    lease.refuse_if_held(tmp_path)
    with Lease(tmp_path, job=job(0)):
        with pytest.raises(LockedError) as caught:
            lease.refuse_if_held(tmp_path)
        way_out = f"wait for it, end it (hpclm cancel {tmp_path}), or choose another out="
        used_by = f"process {os.getpid()} on {socket.gethostname()}, job 7"
        assert str(caught.value) == f"{tmp_path} is in use by another run ({used_by}); {way_out}"
    lease.refuse_if_held(tmp_path)
    assert not lease.holder(tmp_path).get("pid") and lease.holder_words({}) == "process unknown on unknown"


def test_the_lease_of_another_host_without_heartbeats_is_taken_over_after_its_seconds(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "lock").write_text(json.dumps(ELSEWHERE))
    (tmp_path / "lock.beat").write_text("4 17\n")
    os.utime(tmp_path / "lock.beat", (time.time() + 5000,) * 2)  # its clock is wrong, which does not matter
    began = time.monotonic()
    assert taken(tmp_path, seconds=1) == 5 and time.monotonic() - began >= 1
    assert "waiting 1 s for a heartbeat of process 1 on elsewhere" in caplog.text


def test_a_live_holder_on_another_host_is_respected_although_its_lock_is_not_visible(tmp_path):
    (tmp_path / "lock").write_text(json.dumps(ELSEWHERE))
    over = threading.Event()

    def beat():
        number = 0
        while not over.wait(0.15):
            number += 1
            (tmp_path / "lock.beat").write_text(f"4 {number}\n")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(LockedError, match="process 1 on elsewhere, job 9"), Lease(tmp_path, seconds=PATIENCE):
            pass
    finally:
        over.set()
        thread.join()
    assert json.loads((tmp_path / "lock").read_text()) == ELSEWHERE


@pytest.mark.parametrize("stopped", [True, False])
def test_a_requeued_job_takes_over_at_once_and_the_earlier_attempt_finds_out(tmp_path, stopped, caplog):
    caplog.set_level("INFO")
    with holding(tmp_path, job(0)) as zombie:
        if stopped:
            os.kill(zombie.tid, signal.SIGSTOP)
        for other in (
            job(0),
            job(1, "8"),
            None,
        ):  # neither the same start, nor another job, nor a process outside any job
            with pytest.raises(LockedError), Lease(tmp_path, job=other):
                pass
        with Lease(tmp_path, job=job(1)) as lease:
            assert lease.generation == 2 and "waiting" not in caplog.text
            os.kill(zombie.tid, signal.SIGCONT)
            zombie._pipe.send("go")
            lost, said = zombie.end().answer
            assert lost and f"taken over by process {os.getpid()} on " in said and "job 7" in said
            lease.check()
    assert taken(tmp_path) == 3


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    saved(folder / "c", (1, 2))
    return folder


def reset(run, good):
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(good, run)


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize("first", ["the new one saves", "the old one continues"])
def test_an_attempt_that_was_given_up_at_any_system_call_of_a_save_takes_nothing_from_the_next(good, tmp_path, first):
    """It is held before the call, the next attempt takes over and trains, and then it continues."""
    run = tmp_path / "run"
    reset(run, good)
    late = 0
    for call, number, line in traced.points(save_late, run, 3.0):
        if str(run / "c") not in line:
            continue
        reset(run, good)
        with traced.Traced(save_late, run, 3.0, inject=f"{call}:delay_enter={traced.HELD}:when={number}") as old:
            old.go()
            old.wait_until_held(call, number)
            with Lease(run, job=job(1)) as lease:
                new, state = store(run / "c", lease=lease), State()
                begun = new.resume(state, "require").step  # 3 where the old one had published when it was given up
                assert state.is_of(begun), line
                if first == "the new one saves":
                    new.save(State(30.0), progress(3))
                old.release()
                outcome = old.end()
                if first == "the old one continues":
                    assert directory.newest(run / "c")[1].progress["step"] == begun, line
                    new.save(State(30.0), progress(3))
                late += outcome.answer in ("LockedError", "HpclmError")
                assert outcome.answer == "saved" or begun == 2, (line, outcome.answer)
                lease.check()
                assert new.resume(state, "require").step == 3 and state.is_of(30), line
                new.save(State(4.0), progress(4))
        names = {path.name for path in (run / "c").iterdir()}
        assert names == {"latest", *(f"step-0000000{step}" for step in (2, 3, 4))}, (line, names)
    assert late > 20


@needs_strace
def test_an_attempt_that_was_given_up_while_it_signs_off_leaves_the_next_one_its_lock(tmp_path):
    points = traced.points(sign_off, tmp_path)
    assert any(call == "pwrite64" for call, *_ in points)
    for call, number, line in points:
        if str(tmp_path) not in line:
            continue
        (tmp_path / "lock").unlink()
        with traced.Traced(sign_off, tmp_path, inject=f"{call}:delay_enter={traced.HELD}:when={number}") as old:
            old.go()
            old.wait_until_held(call, number)
            with Lease(tmp_path, job=job(1)) as lease:
                old.release()
                old.end()
                lease.check()
                assert lease.generation == 2, line


@needs_strace
@pytest.mark.parametrize("before", ["dead", "given up"])
@pytest.mark.parametrize("held_up", ["rename", "fsync", "flock"])
def test_of_three_attempts_at_once_one_gets_the_lease(tmp_path, before, held_up):
    """Each is held up for a tenth of a second before one of its calls, so that they stand there together."""
    with holding(tmp_path, job(0)) as last:
        if before == "dead":
            os.kill(last.tid, signal.SIGKILL)
            last.end()
        fault = {"calls": "rename,fsync,flock", "inject": f"{held_up}:delay_enter=100000:when=1"}
        with ExitStack() as opened:
            takers = [opened.enter_context(traced.Traced(contend, tmp_path, job(1), 3, **fault)) for _ in range(3)]
            answers = [taker.end().answer for taker in [taker.go() for taker in takers]]
        assert sorted(str(answer)[:1] for answer in answers) == sorted(["2", "/", "/"]), answers


@pytest.mark.parametrize(
    "text", ["garbage", "", "[]", "null", '{"generation": "x"}', '{"generation": -5, "start": "zz"}', "[" * 100_000]
)
def test_a_damaged_lock_file_is_ignored(tmp_path, text):
    with Lease(tmp_path) as lease:
        (tmp_path / "lock").write_text(text)
        lease.check()
    (tmp_path / "lock").write_text(text)
    with Lease(tmp_path) as lease:
        assert lease.generation == 1


def test_a_removed_lock_file_is_still_ours_until_another_attempt_creates_one(tmp_path):
    with Lease(tmp_path) as lease:
        (tmp_path / "lock").unlink()
        lease.check()
        with Lease(tmp_path), pytest.raises(LockedError, match="was taken over"):
            lease.check()


def test_a_folder_has_one_holder_and_a_released_lock_names_none(tmp_path):
    with Lease(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        with pytest.raises(LockedError, match=f"process {os.getpid()} on "), Lease(tmp_path):
            pass
    assert json.loads((tmp_path / "lock").read_text()) == {"generation": 1, "job": None, "start": 0}
    with Lease(tmp_path):
        pass


def test_a_lock_that_names_nobody_is_ours_up_to_our_generation(tmp_path):
    with Lease(tmp_path) as lease:
        for ahead, mine in ((0, True), (1, False), (-1, True)):
            (tmp_path / "lock").write_text(json.dumps({"generation": lease.generation + ahead}))
            assert lease.is_mine() == mine
