"""What a run's files say of its attempts."""

import re

import pytest

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.reporting import history
from hpclm.reporting.timeline import state, summary
from tests.events import rewrite, without
from tests.reporting import made


def test_each_attempt_says_what_it_did_lost_and_was_ended_by(tmp_path):
    found = history.read_history(made.preempted(tmp_path / "run"))
    assert [(a.first, a.last, a.lost) for a in found.attempts] == [(0, 30, 0), (30, 57, 17), (40, 70, 10), (60, 100, 0)]
    assert [a.ended for a in found.attempts] == [
        "SIGUSR1: saved at step 30, exiting; a1 is DOWN",
        "node a2 failed (NODE_FAIL)",
        "rank 3 on a1: CUDA out of memory. Tried to allocate 2 GiB",
        "finished",
    ]
    assert len(found.steps) == 100 and len(found.lost) == 27


def test_the_phases_of_an_attempt_follow_each_other_from_the_queue_to_its_end(tmp_path):
    found = history.read_history(made.preempted(tmp_path / "run"))
    noon = made.NOON.timestamp()
    first = [
        (phase.kind, round(phase.begin - noon, 1), round(phase.end - noon, 1)) for phase in found.attempts[0].phases
    ]
    assert first == [("queued", 0, 60), ("starting", 60, 70), ("training", 70, 102)]
    queued = [round(attempt.seconds("queued")) for attempt in found.attempts]
    assert queued == [60, 98, 63, 20]  # since its job was submitted, or the attempt before it ended
    assert [round(attempt.seconds("lost")) for attempt in found.attempts] == [0, 17, 10, 0]
    for attempt in found.attempts:
        assert all(a.end == b.begin for a, b in zip(attempt.phases, attempt.phases[1:]))
    assert found.wall == pytest.approx(471) and found.goodput == pytest.approx(100 / 471)


def test_the_time_between_attempts_that_no_queue_started_is_not_time_in_a_queue(tmp_path):
    out = made.preempted(tmp_path / "run")
    rewrite(out, lambda event: None if event["kind"] == "submitted" else event | {"job_id": None})
    found = history.read_history(out)
    noon = made.NOON.timestamp()
    assert found.seconds("queued") == 0
    assert [(round(a.begin - noon), round(a.end - noon)) for a in found.attempts] == [
        *((60, 102), (200, 237), (300, 340), (420, 471)),
    ]


def test_an_attempt_that_ended_before_a_phase_was_not_interrupted_and_the_next_one_not_queued(tmp_path):
    out = made.preempted(tmp_path / "run")
    restarts = iter([0, 0, 1, 0])

    def change(event):
        if event["kind"] == "began":
            return event | {"restart": next(restarts), "after": ""}
        return event | {"state": "phase", "ending": "ended at phase 2"} if event.get("state") == "exited" else event

    rewrite(out, change)
    found = history.read_history(out)
    assert "4 attempts. It was interrupted twice" in summary(found) and found.attempts[0].ended == "ended at phase 2"
    assert [round(attempt.seconds("queued")) for attempt in found.attempts] == [60, 0, 63, 20]
    rewrite(out, lambda event: None if event["kind"] == "began" and event["from_step"] else event)
    rewrite(out, lambda event: None if event.get("state") == "done" else event)
    assert history.read_history(out).state == "exited"


def test_a_run_that_has_not_ended_says_when_it_was_last_alive(tmp_path):
    out = made.preempted(tmp_path / "run")
    rewrite(out, lambda event: None if event.get("state") == "done" else event)
    found = history.read_history(out)
    assert state(found).endswith(
        f": not ended, according to its files; the last sign of life was at {made.at(470):%Y-%m-%d %H:%M:%S}."
    )
    assert "4 attempts. It was interrupted 3 times" in summary(found)


def test_a_stranger_reads_what_happened(tmp_path):
    preempted = history.read_history(made.preempted(tmp_path / "run"))
    assert state(preempted) == "100 of 100 steps in 7 min: finished."
    assert summary(preempted) == (
        "The run had 4 attempts. It was interrupted 3 times and resumed from its last checkpoint; 27 steps (27 s) had to be redone. 21% of "
        "the time went into training steps that count (goodput)."
    )


@pytest.mark.parametrize("name", ["ended", "submitted", "metrics.jsonl", "metrics.lost.jsonl"])
def test_what_is_missing_costs_only_what_it_says(name, tmp_path):
    out = made.preempted(tmp_path / "run")
    (out / name).unlink() if "." in name else rewrite(out, without(name))
    missing = history.read_history(out)
    assert len(missing.attempts) == 4
    assert [a.first for a in missing.attempts] == [0, 30, 40, 60] and missing.wall > 0
    assert all(a.end == b.begin for x in missing.attempts for a, b in zip(x.phases, x.phases[1:]))


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "metrics.lost.jsonl"])
def test_a_damaged_line_is_named_and_one_that_is_being_written_is_left_out(name, tmp_path):
    out = made.preempted(tmp_path / "run")
    whole, lines = history.read_history(out), (out / name).read_text()
    (out / name).write_text(lines + '{"st')
    assert history.read_history(out) == whole
    (out / name).write_text(lines + "null\n" + lines)
    with pytest.raises(ConfigError, match=rf"{name}, line {lines.count(chr(10)) + 1}, is damaged"):
        history.read_history(out)


@pytest.mark.parametrize("value", ['"3.0"', "true", "-1e301", "[]", "1" + "0" * 400])
@pytest.mark.parametrize("field", ["loss", "memory", "mine"])
def test_a_value_that_is_not_a_number_is_damage(field, value, tmp_path):
    out = made.trained(tmp_path / "run", [4.0])
    row = made.lines([made.row(1, 1, mine=1.0)])
    key = f'"{field}": '
    damaged = re.sub(rf"{key}[^,}}]*", key + value, row)
    (out / "metrics.jsonl").write_text(row * 300 + damaged + row * 300)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 301, is damaged"):
        history.read_history(out)


def test_of_a_step_that_was_done_again_the_last_row_counts_in_the_place_of_the_first(tmp_path):
    out = made.trained(tmp_path / "run", [4.0, 3.0, 2.0])
    rows = [
        made.row(step, at, loss=loss)
        for at, (step, loss) in enumerate([(1, 4.0), (2, 3.0), (3, 2.0), (2, 2.5), (4, 1.0)])
    ]
    (out / "metrics.jsonl").write_text(made.lines(rows))
    found = history.read_history(out)
    assert found.steps["step"].tolist() == [1, 2, 3, 4] and found.steps["loss"].tolist() == [4.0, 2.5, 2.0, 1.0]


def test_what_users_report_is_the_mean_of_the_last_fifty_steps(tmp_path):
    out = made.trained(tmp_path / "run", [4.0])
    (out / "metrics.jsonl").write_text(made.lines(made.row(step, step, mine=step) for step in range(1, 71)))
    assert history.read_history(out).mean("mine") == sum(range(21, 71)) / 50


def test_a_run_that_has_not_started_has_no_attempts(tmp_path):
    found = history.read_history(tmp_path)
    assert not found.attempts and found.goodput is None and "not started" in state(found) and summary(found) == ""


def test_steps_of_a_killed_attempt_are_kept_apart_and_counted_as_lost(tiny, tmp_path):
    assert cli.main(["train", *tiny("run", "stop_at=10", "checkpoint.every=4")]) == 0
    out = tmp_path / "run"
    rows = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    import shutil

    shutil.rmtree(out / "checkpoints/step-00000010")  # as if it had been killed before it saved
    (out / "checkpoints/latest").write_text("step-00000008\n")
    rewrite(out, without("ended"))
    assert cli.main(["train", *tiny("run", "checkpoint.every=4")]) == 0
    assert (out / "metrics.lost.jsonl").read_text() == "".join(rows[8:])
    found = history.read_history(out)
    assert [(a.first, a.last, a.lost) for a in found.attempts] == [(0, 10, 2), (8, 12, 0)]
    assert found.steps["step"].tolist() == list(range(1, 13)) and found.attempts[1].ended.startswith("done at step 12")
    assert 0 < found.goodput < 1 and found.attempts[0].seconds("lost") > 0
