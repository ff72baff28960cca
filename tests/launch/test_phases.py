"""Ranks that end before a phase of the data are started again by whoever started them, until a signal says otherwise."""

import signal

import pytest

from tests.events import of_kind
from tests.launch import launched
from tests.launch.launched import ready
from tests.runs import PATIENCE

LAUNCHERS = pytest.mark.parametrize(
    "how, size", [("local", "job.gpus=2"), pytest.param("mpi", "job.gpus=2", marks=[pytest.mark.mpi, pytest.mark.slow])]
)


def starts(out):
    """How often each of two ranks was started."""
    return [(out / f"starts-{rank}").stat().st_size for rank in (0, 1)]


@LAUNCHERS
def test_they_are_started_again_for_each_phase_and_leave_nothing_that_explains_another_end(how, size, tmp_path):
    code, told, errors = launched.launched(how, tmp_path, size, "phase=2", "env=HPCLM_ERRORS", "exit=3")
    assert code == 3 and starts(tmp_path) == [3, 3], errors
    ends = of_kind(tmp_path, "ended")
    assert [event.get("state") for event in ends] == ["phase", "phase", None] and ends[-1]["code"] == 3
    assert {line.rpartition("-")[2] for line in told.splitlines() if "HPCLM_ERRORS" in line} == {"3"}


@LAUNCHERS
def test_after_a_signal_the_ranks_are_not_started_again(how, size, tmp_path):
    process = launched.start(how, tmp_path, size, "ready", "hear", "phase=5")
    ready(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 85 and starts(tmp_path) == [1, 1], errors
