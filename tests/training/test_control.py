"""When a run saves and exits, what it says after a signal, and with which code it ends."""

import logging
import time
from types import SimpleNamespace

import pytest
import torch

from hpclm import config
from hpclm.base.errors import HpclmError
from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.config import CheckpointConfig
from hpclm.config.phases import Timeline
from hpclm.config.plan import Length
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import single
from hpclm.node.preemption import Preemption
from hpclm.optim.stability import Health
from hpclm.parallel.mesh import Compute
from hpclm.training.control import Control, ControlState, hash_slots, sum_of_hashes
from hpclm.training.loop import TrainingLoop
from hpclm.training.opening import OpenRun
from hpclm.training.run_data import HeldOut, RunData
from hpclm.training.saver import Saver, due
from tests.checkpoint.state import State

CPU = Compute(torch.device("cpu"), torch.float32)


def test_the_sum_of_hashes_is_exact_whatever_ranks_send_the_same():
    hashes = [2**64 - 1, 2**63 + 12345678901, 2**32, 0]
    sent = [hash_slots(value, replica, 4) for replica, value in enumerate(hashes) for _ in range(3)]
    reduced = torch.tensor(sent, dtype=torch.float64).amax(0).tolist()
    assert sum_of_hashes(reduced) == f"{sum(hashes) % 2**64:016x}" == f"{2**63 + 12345678901 + 2**32 - 1:016x}"


def saver_of(folder, begin=Progress(), warn_seconds=120, samples_per_save=float("inf"), **settings):  # noqa: B008
    settings = CheckpointConfig(**{"every": 0, "background": False, **settings})
    return Saver(CheckpointStore(folder, Retention(), {}), settings, warn_seconds, begin, samples_per_save)


def loop_of(out, *words, begin=Progress(), since=None, held_out=()):  # noqa: B008
    """The loop of a run that is in step 7 of 100, with what ends its process, and with the requests that were granted."""
    settings = config.load(None, ["data.source=synthetic", f"out={out}", "cluster.verify_every=0", *words])
    told, context = SimpleNamespace(ends=[], removed=[]), single()
    data = RunData(settings.plan(), Length(100, None), begin, Timeline(settings), None, None, [*held_out])
    preemption = SimpleNamespace(seconds=lambda name: (since or {}).get(name, 0.0))
    store = CheckpointStore(out, Retention(), {})
    loop = TrainingLoop(OpenRun(settings, context, CPU, data, State(), store, preemption))
    loop.control.remove = told.removed.append
    context.watchdog.enter("step", 7)
    context.ending.stop = told.ends.append
    return loop, told


@pytest.mark.parametrize(
    "words, since, says",
    [
        ([], {"SIGUSR2": 2.0}, "SIGUSR2: after step 7 or the next one, within job.warn_seconds=120, the run saves"),
        (
            ["job.warn_seconds=0"],
            {"SIGUSR2": 2.0},
            "SIGUSR2: after step 7 or the next one, within checkpoint.grace_seconds=30, the",
        ),
        (
            [],
            {"SIGTERM": 3.0},
            "SIGTERM: after step 7 or the next one, within checkpoint.grace_seconds=30, the run saves",
        ),
        ([], {"SIGINT": 3.0}, "SIGINT: after step 7 or the next one, the run saves"),
        ([], {"SIGINT": 9.0, "SIGTERM": 1.0}, "SIGINT: after step 7 or the next one, the run saves"),
        ([], {"SIGTERM": 1.9}, None),
        ([], {}, None),
    ],
)
def test_what_follows_a_signal_in_a_long_step_is_said_once(words, since, says, tmp_path, caplog):
    loop, told = loop_of(tmp_path, *words, since=since)
    watchdog = loop.context.watchdog
    watchdog.enter("evaluation", 6)
    watchdog.each_turn()
    assert not caplog.messages
    watchdog.enter("step", 7)
    watchdog.each_turn()
    watchdog.each_turn()
    assert (
        len(caplog.messages) == (says is not None) and all(says in line for line in caplog.messages) and not told.ends
    )
    sooner = "press Ctrl-C again" if "SIGINT" in since else f"hpclm cancel --now {tmp_path}"
    assert all(line.endswith(f"without saving: {sooner}") for line in caplog.messages)


@pytest.mark.parametrize(
    "since, end",
    [
        ({"SIGTERM": 35.0}, None),
        (
            {"SIGTERM": 36.0},
            "SIGTERM: step 7 has gone on for 36 s since the signal, and checkpoint.grace_seconds=30 has passed",
        ),
        ({"SIGUSR2": 125.0}, None),
        (
            {"SIGUSR2": 126.0},
            "SIGUSR2: step 7 has gone on for 126 s since the signal, and job.warn_seconds=120 has passed",
        ),
        ({"SIGINT": 999.0}, None),
    ],
)
def test_a_step_that_outlasts_what_a_signal_leaves_ends_the_process(since, end, tmp_path):
    loop, told = loop_of(tmp_path, since=since, begin=Progress(4))
    loop.context.watchdog.each_turn()
    assert [text.partition(": exiting")[0] for text in told.ends] == [end] * (end is not None)
    assert all(text.endswith("exiting without saving; the steps after 4 will be repeated") for text in told.ends)


@pytest.mark.parametrize(
    "words, progress, finished",
    [
        ([], Progress(99), False),
        ([], Progress(100), True),
        (["stop_at=5"], Progress(4), False),
        (["stop_at=5"], Progress(6), True),
        (["budget={hours: 0.5, steps: 200}"], Progress(1, seconds=1799.0), False),
        (["budget={hours: 0.5, steps: 200}"], Progress(1, seconds=1800.0), True),
    ],
)
def test_a_run_is_finished_at_its_last_step_at_stop_at_or_when_its_hours_are_over(words, progress, finished, tmp_path):
    assert loop_of(tmp_path, *words)[0].finished(progress) == finished


def test_an_attempt_leaves_at_multiples_of_exit_interval_but_not_where_it_began(tmp_path):
    loop, _ = loop_of(tmp_path, "exit_interval=4", begin=Progress(8))
    assert [step for step in range(8, 14) if loop.exit_is_due(Progress(step))] == [12]


@pytest.mark.parametrize(
    "state, step, unmeasured, code",
    [
        (ControlState({"SIGTERM": 1.0}), 5, False, 85),
        (ControlState({"SIGTERM": 1.0}), 100, False, 0),  # nothing is left to do
        (ControlState({"SIGTERM": 1.0}), 100, True, 85),
        (ControlState({"SIGTERM": 1.0}, stop="stop"), 5, False, 0),
        (ControlState(stop="kill_switch"), 5, False, 0),
        (ControlState(out_of_time=True), 5, False, 0),
    ],
)
def test_only_a_run_that_a_signal_ends_before_its_time_asks_to_be_started_again(
    state, step, unmeasured, code, tmp_path
):
    loop, told = loop_of(tmp_path, held_out=[HeldOut("valid", None, 1)] if unmeasured else [])
    loop.control.state = state
    assert loop.exit(Progress(step)) == code
    assert loop.saver.step == step and told.removed == ["save-now", *["stop"] * bool(state.stop)]


def test_the_signal_that_came_first_counts_and_a_request_to_stop_goes_before_all():
    both = {"SIGTERM": 5.0, "SIGUSR2": 70.0}
    assert ControlState(both, out_of_time=True).leaving == ControlState(both).signal == "SIGUSR2"
    assert ControlState(both, stop="stop").leaving == "stop"
    assert ControlState(out_of_time=True).leaving == "exit_minutes" and ControlState().leaving is None


def test_a_request_to_save_is_answered_where_nothing_is_saved(tmp_path, caplog):
    loop, told = loop_of(tmp_path, "checkpoint.enabled=false")
    loop.control.state = ControlState(save=True)
    assert not loop.save_is_due(Progress(3), exits=False)
    loop.answer_save_request()
    assert caplog.messages == ["request to save: checkpoint.enabled=false, so nothing is saved"]
    assert told.removed == ["save-now"] and not loop.saver.step


def test_a_save_waits_while_steps_are_skipped(tmp_path):
    loop, told = loop_of(tmp_path)
    loop.control.state = ControlState(save=True)
    assert not loop.save_is_due(Progress(3, health=Health(skipped_in_a_row=1)), exits=False)
    loop.answer_save_request()
    assert not told.removed
    loop.control.state = ControlState()
    assert loop.save_is_due(Progress(4), exits=False)
    loop.save(Progress(4))
    loop.saver.wait()
    assert loop.saver.step == 4 and not loop.save_is_due(Progress(5), exits=False)


@pytest.mark.parametrize(
    "micro_batch, count, late", [(0.0, 1, False), (1.0, 9, True), (1.0, 10, False), (20.0, 9, False)]
)
def test_answers_are_read_late_only_where_time_to_save_remains_after_three_steps(micro_batch, count, late, tmp_path):
    loop, _ = loop_of(tmp_path)
    loop.control.news = ControlState(micro_batch_seconds=micro_batch)
    assert loop.stepper.signals_can_wait(count) == late  # of checkpoint.grace_seconds=30


def test_something_is_due_at_multiples_and_not_before_the_first_step():
    assert [step for step in range(11) if due(5, Progress(step))] == [5, 10]
    assert not any(due(0, Progress(step)) for step in range(3))


def test_saves_by_the_clock_and_by_epochs_count_from_the_last_one(tmp_path):
    by_clock = saver_of(tmp_path / "a", minutes=9.0)
    minutes = (8.9, 9.0, 17.9, 18.0, 20.0)
    found = []
    for step, minute in enumerate(minutes, 1):
        if by_clock.due(Progress(step), ControlState(minutes=minute)):
            by_clock.save(State(), Progress(step), None, ControlState(minutes=minute))
            found.append(minute)
    assert found == [9.0, 18.0]
    by_epochs, found = saver_of(tmp_path / "b", Progress(3, 31), samples_per_save=30), []
    for step, samples in enumerate((50, 59, 60, 70, 125, 140), 4):
        if by_epochs.due(Progress(step, samples), ControlState()):
            by_epochs.save(State(), Progress(step, samples), None, ControlState())
            found.append(samples)
    assert found == [60, 125]


def test_what_is_on_its_way_is_not_saved_again(tmp_path):
    saver = saver_of(tmp_path, background=True, every=5)
    saver.save(State(), Progress(5), None, ControlState())
    assert saver.store.pending and not saver.due(Progress(5), ControlState(save=True))
    assert saver.due(Progress(6), ControlState(save=True))
    saver.wait()
    assert saver.step == 5 and not saver.due(Progress(5), ControlState(save=True))


def test_a_save_that_fails_costs_no_training_and_at_the_exit_no_run_that_starts_again(tmp_path, caplog):
    (tmp_path / "in the way").touch()
    saver = saver_of(tmp_path / "in the way")
    saver.save(State(), Progress(3), None, ControlState())
    assert caplog.messages[-1].endswith("training continues; the checkpoints before it are untouched")
    saver.exit(State(), Progress(4), None, ControlState(), requeue=True)
    assert caplog.messages[-1].endswith("the steps after 0 will be repeated")
    with pytest.raises(HpclmError):
        saver.exit(State(), Progress(4), None, ControlState(), requeue=False)


def test_a_save_may_take_half_as_long_again_as_the_longest_one(tmp_path):
    saver = saver_of(tmp_path)
    assert saver.seconds() == 0
    saver._longest = 4.0  # as if the disk had been slow
    saver.save(State(), Progress(1), None, ControlState())
    assert saver.seconds() == 6.0 and saver.step == 1


@pytest.mark.parametrize("warn_seconds, left", [(120, 110.0), (0, 20.0), (None, 20.0)])
def test_without_a_warning_the_grace_is_all_that_a_signal_leaves(warn_seconds, left, tmp_path):
    saver = saver_of(tmp_path, warn_seconds=warn_seconds)
    assert saver.seconds_left(ControlState({"SIGUSR1": 10.0})) == left
    assert saver.seconds_left(ControlState({"SIGUSR2": 10.0})) == left


def test_an_unhealthy_checkpoint_is_told_with_its_reason(tmp_path, caplog):
    saver = saver_of(tmp_path)
    with caplog.at_level(logging.INFO):
        saver.save(State(), Progress(3, health=Health(3.0, 3.0, 0.1, 2)), None, ControlState())
    assert caplog.messages[0].startswith("saved step 3 in ")
    assert caplog.messages[1].startswith("step 3 is saved, and does not replace healthy checkpoints: ")


def control_of(out, *words, began=0.0):
    """The control of one rank whose process started ``began`` seconds ago."""
    settings = config.load(None, ["data.source=synthetic", f"out={out}", *words])
    context = single(world=World("single", 0, 1, began=time.time() - began))
    data = RunData(settings.plan(), Length(100, None), Progress(seconds=5.0), Timeline(settings), None, None, [])
    return Control(OpenRun(settings, context, CPU, data, State(), CheckpointStore(out, Retention(), {}), Preemption()))


@pytest.mark.parametrize(
    "words, began, over", [(["exit_minutes=60"], 3600, True), (["exit_minutes=60"], 0, False), ([], 1e6, False)]
)
def test_the_time_of_an_attempt_counts_from_the_start_of_its_processes(words, began, over, tmp_path):
    state = control_of(tmp_path, *words, began=began).poll()
    assert state.out_of_time == over and state.trained_seconds == 5.0 and state.written and not state.since


@pytest.mark.parametrize(
    "names, stop, save",
    [
        ([], None, False),
        (["stop"], "stop", False),
        (["kill"], "kill_switch", False),
        (["stop", "kill"], "kill_switch", False),  # which also ends the next start
        (["save-now"], None, True),
    ],
)
def test_requests_are_seen_and_a_kill_switch_outranks_a_stop(names, stop, save, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    state = control_of(tmp_path, f"kill_switch={tmp_path}/kill").poll()
    assert (state.stop, state.save) == (stop, save)


def test_the_loop_stops_for_other_work_only_where_something_may_have_to_be_done(tmp_path):
    loop, _ = loop_of(tmp_path, "checkpoint={every: 7, background: true}", "evaluate.every=5")

    def stops(step, **news):
        loop.control.news = ControlState(micro_batch_seconds=1e-3, **news)
        return loop.work_is_due(Progress(step))

    assert loop.work_is_due(Progress(1))  # nothing is known of an attempt's first step
    loop.control.state = ControlState(micro_batch_seconds=1e-3)
    assert not loop.work_is_due(Progress(1))
    assert [step for step in (1, 2, 5, 7, 10, 14, 99, 100) if stops(step)] == [5, 7, 10, 14, 100]
    asked = {"stop": "stop", "since": {"SIGTERM": 1.0}, "save": True, "lost": True, "out_of_time": True}
    assert all(stops(1, **{name: value}) for name, value in asked.items())
    loop.saver.store.begin(State(), Progress(1))
    assert not stops(2, written=False) and stops(2, written=True)  # to publish it
    loop.saver.wait()
    assert not stops(2, written=True)
    loop.saver.postponed = True
    assert stops(2)
