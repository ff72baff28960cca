"""summary.json: what rank 0 writes there, when, and what it takes to read it."""

import json
import os
import stat
import time

import pytest

from hpclm.base.errors import DivergedError
from hpclm.rundir import metrics_file, summary
from hpclm.rundir.lease import Lease
from hpclm.rundir.summary import CURVE, LossCurve, RunSummary
from tests.events import of_kind
from tests.rundir.holders import job
from tests.rundir.test_runs import checkpoint

ATTEMPT = {
    "time": "2026-01-01T00:00:00+0000",
    "from_step": 4,
    "host": "here",
    "pid": 1,
    "command": ["x"],
    "hosts": ["a"],
}


def step(number, loss=2.5, **more):
    return {"step": number, "loss": loss, "time": 100.0 + number, "step_seconds": 2.0, "tokens_per_second": 8.0, **more}


def test_it_says_how_a_run_stands_from_its_first_moment_to_its_end(tmp_path, monkeypatch):
    (tmp_path / "summary.json.tmp-elsewhere-1-abc").touch()
    os.utime(tmp_path / "summary.json.tmp-elsewhere-1-abc", (1, 1))
    with RunSummary(tmp_path) as kept:
        assert summary.read_summary(tmp_path)["state"] == "starting" and summary.read_summary(tmp_path)["step"] == 0
        kept.begin(ATTEMPT, 20)
        told = summary.read_summary(tmp_path)
        assert (told["state"], told["step"], told["steps"]) == ("starting", 4, 20)
        kept.resume([step(3), step(4)])
        kept.measured(step(5))  # the first is written at once
        told = summary.read_summary(tmp_path)
        assert (told["state"], told["step"], told["stepped"], told["loss"]) == ("running", 5, 105.0, 2.5)
        assert (told["step_seconds"], told["tokens_per_second"], told["curve"]) == (2.0, 8.0, [2.5] * 3)
        checkpoint(tmp_path / "checkpoints/step-00000006")
        kept.measured({"step": 6, "validation_loss": 2.25})
        kept.measured(step(6, float("nan"), spiking_since=6))
        assert summary.read_summary(tmp_path)["step"] == 5
        monkeypatch.setattr(summary, "INTERVAL", 0.0)
        kept.tick()  # as the thread does when it is idle
        told = summary.read_summary(tmp_path)
        assert (told["step"], told["loss"], told["spiking_since"], told["checkpoint"]) == (6, None, 6, 6)
        assert (told["validation_loss"], told["validation_step"], told["code"]) == (2.25, 6, None)
        kept.end("exited", "SIGTERM: saved at step 6, exiting", 85)
        told = summary.read_summary(tmp_path)
        assert (told["state"], told["ending"], told["code"]) == ("exited", "SIGTERM: saved at step 6, exiting", 85)
        [end] = of_kind(tmp_path, "ended")
        assert {name: end[name] for name in ("state", "ending", "code")} == {
            name: told[name] for name in ("state", "ending", "code")
        }
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["events.jsonl", "summary.json"]
    with RunSummary(tmp_path) as kept:  # the next attempt; what is known stays until it knows more
        told = summary.read_summary(tmp_path)
        assert (told["state"], told["ending"], told["step"], told["curve"]) == ("starting", "", 6, [2.5] * 3)
        kept.begin(ATTEMPT, 20)
        kept.resume([step(4, 2.75)])  # back to step 4: nothing is known of later ones
        kept.write()
        told = summary.read_summary(tmp_path)
        assert (told["step"], told["loss"], told["spiking_since"], told["curve"]) == (4, 2.75, None, [2.75])
        assert "validation_loss" not in told


TRACE = (
    'rank 0 on a (pid 5) failed: Traceback (most recent call last):\n  File "x", line 1\nValueError: no \x1b[31mluck\n'
)


@pytest.mark.parametrize(
    "error, ending, code",
    [
        (DivergedError("the loss is not finite"), "the loss is not finite", 93),
        (ValueError("no luck\nat all"), "ValueError: no luck", 1),
        (KeyError("x"), "KeyError: 'x'", 1),
    ],
)
def test_an_error_is_how_it_ended(error, ending, code, tmp_path):
    with pytest.raises(type(error)), RunSummary(tmp_path) as kept:
        raise error
    told = summary.read_summary(tmp_path)
    assert (told["state"], told["ending"], told["code"]) == ("failed", ending, code)
    with pytest.raises(type(error)), RunSummary(tmp_path) as kept:
        kept.failed(TRACE)  # the cause, which the guard of all ranks has recorded before
        raise error
    assert summary.read_summary(tmp_path)["ending"] == "rank 0 on a (pid 5) failed: ValueError: no  [31mluck"


def test_no_secret_reaches_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "abcdefgh12345")
    RunSummary(tmp_path).failed("cannot log in with abcdefgh12345")
    assert summary.read_summary(tmp_path)["ending"] == "cannot log in with ***"


@pytest.mark.parametrize("appended", [metrics_file.appended, metrics_file.expert_tokens])
def test_an_attempt_that_was_given_up_writes_no_more(tmp_path, appended):
    with Lease(tmp_path, job=job(0)) as lease, RunSummary(tmp_path, lease) as old:
        metrics = appended(tmp_path, old.is_mine)
        old.measured(step(1))
        metrics.write("1\n")
        with Lease(tmp_path, job=job(1)) as later, RunSummary(tmp_path, later) as new:
            new.measured(step(7))
            metrics.write("2\n")
            old.end("exited", "SIGTERM: saved at step 1, exiting", 85)
            assert (summary.read_summary(tmp_path)["state"], summary.read_summary(tmp_path)["step"]) == ("running", 7)
            assert metrics.path.read_text() == "1\n"
            metrics.path.unlink()
            metrics.write("3\n")
            metrics.close()
            assert not metrics.path.exists()


def test_what_cannot_be_written_is_written_later_and_never_through_a_link(tmp_path):
    kept = RunSummary(tmp_path / "run")
    kept.measured(step(1))
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run/summary.json").symlink_to(tmp_path / "mine")
    kept.write()
    assert summary.read_summary(tmp_path / "run")["step"] == 1 and (tmp_path / "mine").read_text() == "mine"
    assert stat.S_IMODE((tmp_path / "run/summary.json").lstat().st_mode) == 0o644


@pytest.mark.parametrize(
    "change",
    [{"step": "5"}, {"loss": [1]}, {"ending": 1}, {"curve": [None]}, {"state": 1}],
)
def test_a_summary_with_odd_values_is_none(change, tmp_path):
    RunSummary(tmp_path).measured(step(1))
    content = summary.read_summary(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({**content, **change}))
    assert content and not summary.read_summary(tmp_path)


@pytest.mark.parametrize("count", [5, CURVE, 100, 1001])
def test_a_loss_curve_has_evenly_spaced_points(count):
    curve = LossCurve()
    for number in range(count):
        curve.add(float(number))
    gaps = {after - before for before, after in zip(curve.points, curve.points[1:], strict=False)}
    assert curve.points[0] == 0 and len(gaps) == 1 and min(count, CURVE) <= len(curve.points) < 2 * CURVE


HANG = "no progress for 60 s: rank 1 on a (pid 7) is blocking the others"


@pytest.mark.parametrize("first", ["rank 0", "another rank"])
def test_the_first_cause_of_an_attempt_is_final_whichever_rank_records_it(first, tmp_path):
    with Lease(tmp_path) as lease, RunSummary(tmp_path, lease) as kept:
        kept.measured(step(1))
        other = summary.failed_without_main(tmp_path)
        kept.failed(HANG) if first == "rank 0" else other(HANG)
        other("rank 0 on a (pid 6) was killed: it ended without a message (SIGKILL, perhaps out of memory, or a crash)")
        kept.measured(step(2))  # of rank 0, which a signal had stopped and which wakes
        kept.write()
        kept.failed("it lost a connection")
        kept.end("done", "done at step 2", 0)
        assert kept.interrupted() == ""
        told = summary.read_summary(tmp_path)
        assert (told["state"], told["ending"]) == ("failed", HANG)
        assert [end["ending"] for end in of_kind(tmp_path, "ended")] == [HANG]
    with Lease(tmp_path) as lease, RunSummary(tmp_path, lease) as kept:
        summary.failed_without_main(tmp_path)("rank 0 was killed")  # before it has written that it starts, or after
        assert summary.read_summary(tmp_path)["ending"] == "rank 0 was killed"


def test_the_end_of_an_attempt_whose_rank_0_died_before_it_wrote_anything_is_recorded(tmp_path):
    with Lease(tmp_path) as lease, RunSummary(tmp_path, lease) as kept:
        kept.failed(HANG)
    with Lease(tmp_path):
        summary.failed_without_main(tmp_path)("rank 0 was killed")
        assert summary.read_summary(tmp_path)["ending"] == "rank 0 was killed"


def test_the_length_of_the_last_start_is_known_also_if_it_ended_before_a_step(tmp_path):
    with RunSummary(tmp_path) as kept:
        kept.begin({**ATTEMPT, "began": 100.0}, 20)
        kept.measured(step(5))  # at 105 s, after 2 s
        kept.measured(step(6))
    assert summary.read_summary(tmp_path)["start_seconds"] == 3.0
    with RunSummary(tmp_path) as kept:
        kept.begin({**ATTEMPT, "began": time.time() - 40}, 20)
        kept.resume([step(5)])
        assert summary.read_summary(tmp_path)["start_seconds"] == 3.0
        kept.end("exited", "SIGUSR2: nothing saved", 85)
    known = summary.read_summary(tmp_path)["start_seconds"]
    assert known >= 40
    RunSummary(tmp_path).failed("refused before it was recorded")
    assert summary.read_summary(tmp_path)["start_seconds"] == known


def test_an_interrupt_is_how_a_run_ended(tmp_path):
    with pytest.raises(KeyboardInterrupt), RunSummary(tmp_path) as kept:
        kept.begin(ATTEMPT, 20)
        raise KeyboardInterrupt
    told = summary.read_summary(tmp_path)
    assert (told["state"], told["ending"], told["code"]) == ("exited", "interrupted: nothing saved, exiting", 130)


def test_a_step_without_tokens_leaves_the_loss(tmp_path):
    with RunSummary(tmp_path) as kept:
        kept.begin(ATTEMPT, 20)
        kept.measured(step(5))
        kept.measured(step(6, None, counted_tokens=0))
        kept.write()
    told = summary.read_summary(tmp_path)
    assert (told["step"], told["loss"]) == (6, 2.5)


def test_speed_is_that_of_the_last_fifty_steps_and_a_curve_has_16_to_31_points(tmp_path):
    with RunSummary(tmp_path) as kept:
        kept.begin(ATTEMPT, 20)
        for number in range(1, 61):
            kept.measured(
                step(
                    number, step_seconds=1.0 if number <= 35 else 3.0, tokens_per_second=100.0 if number <= 35 else 20.0
                )
            )
        kept.write()
    told = summary.read_summary(tmp_path)  # 25 steps of 1 s and 100 tokens, and 25 of 3 s and 60 tokens
    assert (told["step_seconds"], told["tokens_per_second"]) == (2.0, (25 * 100 + 25 * 60) / 100)
    curve = LossCurve()
    for number in range(1000):
        curve.add(float(number))
    assert curve.points == [64.0 * number for number in range(16)]
