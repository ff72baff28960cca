"""events.jsonl: lines of at most 4 KiB, appended by any process, whole or not at all."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hpclm.base.errors import ConfigError
from hpclm.rundir import events
from tests import traced


def test_events_are_read_in_the_order_in_which_they_were_written(tmp_path):
    assert events.read_events(tmp_path) == []
    events.append(tmp_path, "submitted", cluster="slurm", job_id="7", nodes=2, tasks_per_node=1)
    events.append(tmp_path, "began", from_step=0, hosts=["n1"])
    read = events.read_events(tmp_path)
    assert [(event["kind"], event.get("job_id"), event.get("hosts")) for event in read] == [
        ("submitted", "7", None),
        ("began", None, ["n1"]),
    ]
    assert (tmp_path / events.NAME).stat().st_mode & 0o777 == 0o644


def test_what_does_not_fit_into_a_line_is_in_a_file_that_the_line_names(tmp_path):
    (tmp_path / "logs").mkdir(mode=0o700)
    facts = {"hosts": [f"node{number}" for number in range(1000)], "command": "x" * 5000, "from_step": 4}
    events.append(tmp_path, "began", **facts)
    [line] = (tmp_path / events.NAME).read_text().splitlines()
    [event] = events.read_events(tmp_path)
    assert len(line) < events.MAX_LINE_BYTES and event["from_step"] == 4 and "hosts" not in event
    whole = events.whole(tmp_path, event)
    assert {name: whole[name] for name in facts} == facts
    (tmp_path / event["more"]).write_text("x")
    with pytest.raises(ConfigError, match=rf"{event['more']} is damaged"):
        events.whole(tmp_path, event)


def test_writers_at_the_same_time_lose_no_event(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda number: append_many(tmp_path, number), range(4))]
    written = [(event["pid"], event["step"]) for event in events.read_events(tmp_path)]
    assert sorted(written) == [(number, step) for number in range(4) for step in range(10)]


def append_many(out, number):
    for step in range(10):
        events.append(out, "ended", code=0, pid=number, step=step)


@pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace here")
@pytest.mark.parametrize("fault", ["signal=SIGKILL", "error=ENOSPC"])
def test_an_append_that_is_killed_or_fails_at_any_call_leaves_the_event_or_none(fault, tmp_path):
    points = traced.points(append_two, made(tmp_path / "whole"))
    assert {"write", "fsync"} <= {call for call, *_ in points}
    for call, number, line in points:
        out = made(tmp_path / f"{call}-{number}")
        with traced.Traced(append_two, out, inject=f"{call}:{fault}:when={number}") as process:
            process.go().end(survives=False)
        kinds = [event["kind"] for event in events.read_events(out)]
        assert kinds in (["roll back"], ["roll back", "began"], ["roll back", "began", "ended"]), line
        events.append(out, "cancelled", by="me")
        assert [event["kind"] for event in events.read_events(out)] == [*kinds, "cancelled"], line


def made(out):
    (out / "logs").mkdir(parents=True, mode=0o700)
    events.append(out, "roll back", step=7)
    with (out / events.NAME).open("a") as file:
        file.write('{"time": "2026')
    return out


def append_two(gate, out):
    gate()
    events.append(out, "began", hosts=["node"] * 1000, from_step=3)
    events.append(out, "ended", code=0)


def test_a_file_that_cannot_be_read_is_not_taken_for_none(tmp_path):
    (tmp_path / events.NAME).mkdir()
    with pytest.raises(ConfigError, match=r"events\.jsonl cannot be read: Is a directory; move it away"):
        events.read_or_refuse(tmp_path)
