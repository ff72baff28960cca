"""A signal that comes during a step which does not end."""

import signal

import pytest

from tests.forks import Ranks
from tests.runs import ROOT, until

ENDLESS = ["engine.name=tests.training.endless:EndlessStep", "checkpoint.every=1", "checkpoint.background=false"]


WORDS = [*ENDLESS, "checkpoint.grace_seconds=0.5", "job.warn_seconds=1"]
SETTINGS = {signal.SIGTERM: "checkpoint.grace_seconds=0.5", signal.SIGUSR2: "job.warn_seconds=1"}


@pytest.mark.parametrize("size, number", [(1, signal.SIGTERM), (2, signal.SIGUSR2)])
def test_the_log_says_what_follows_and_a_step_that_outlasts_the_time_left_ends_all_ranks_unsaved_with_85(
    size, number, tiny, tmp_path
):
    out = tmp_path / "run"
    with Ranks(size, tiny("run", *WORDS), PYTHONPATH=str(ROOT)) as ranks:
        until(lambda: (out / "log.txt").exists() and "saved step 2" in (out / "log.txt").read_text(), "step 2")
        ranks.processes[0].send_signal(number)
        assert {code for code, _ in ranks.wait().values()} == {85}
    log, name, setting = (out / "log.txt").read_text(), number.name, SETTINGS[number]
    assert f"{name}: after step 3 or the next one, within {setting}, the run saves, if there is time, and exits" in log
    assert f"to end it sooner, without saving: hpclm cancel --now {out}" in log
    assert f"and {setting} has passed: exiting without saving; the steps after 2 will be repeated" in log


def test_a_limit_of_cpu_time_that_is_near_is_a_warning_of_which_nothing_but_a_save_follows(tiny, tmp_path):
    out = tmp_path / "run"
    with Ranks(2, tiny("run", "budget.steps=1000000", "optim.schedule=constant")) as ranks:
        until(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text(), "a step")
        ranks.processes[1].send_signal(signal.SIGXCPU)
        assert {code for code, _ in ranks.wait().values()} == {85}
    assert "SIGXCPU: saved at step " in (out / "log.txt").read_text()
