"""What is said of hung runs and slow ranks, from what is known of them."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from hpclm.distributed import hang
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext, single
from hpclm.distributed.hang import RankState, culprits, report
from hpclm.distributed.ranks import RankInfo
from hpclm.distributed.stragglers import MIN_STEPS, Stragglers, WorkTimer
from tests import ranks
from tests.runs import until

EVERYONE = [RankInfo(rank, 4, host=f"node{rank // 2}", pid=100 + rank) for rank in range(4)]
REDUCE = {"location": "hpclm.engine.step:88 in gradient_norm", "waits_in": "all_reduce"}
GATHER = {"location": "hpclm.training.run_data:60 in on_main", "waits_in": "all_gather"}
BACKWARD = {"location": "hpclm.engine.step:107 in accumulate", "waits_in": "backward"}
DATA = {"location": "hpclm.data.batches:91 in _load"}


def states(*positions):
    """States of four ranks; None of one that does not answer."""
    doing = {"phase": "step", "step": 12, "idle": 60.0}
    return {rank: RankState(**doing, **position) for rank, position in enumerate(positions) if position}


@pytest.mark.parametrize(
    "known, blocking",
    {
        "one reads, the others wait": (states(REDUCE, REDUCE, DATA, REDUCE), [2]),
        "one reads, the others may compute": (states(BACKWARD, DATA, BACKWARD, BACKWARD), [1]),
        "one may compute, the others wait": (states(REDUCE, REDUCE, REDUCE, BACKWARD), [3]),
        "one waits for something else": (states(REDUCE, GATHER, REDUCE, REDUCE), [1]),
        "one does not answer": (states(REDUCE, REDUCE, REDUCE, None), [3]),
        "one does not answer, and another reads": (states(REDUCE, DATA, REDUCE, None), [3]),
        "all wait alike": (states(REDUCE, REDUCE, REDUCE, REDUCE), []),
        "halves": (states(REDUCE, REDUCE, GATHER, GATHER), []),
    }.values(),
)
def test_the_ranks_that_block_the_others_are_named(known, blocking):
    assert culprits(known, 4) == blocking


def test_the_report_names_rank_node_process_place_and_who_waits_where():
    text = report(states(REDUCE, REDUCE, DATA, REDUCE), EVERYONE, None)
    assert text.splitlines()[:2] == [
        "no progress for 60 s: rank 2 on node1 (pid 102) is blocking the others, in step 12, at hpclm.data.batches:91 in _load",
        "  ranks 0-1, 3: step 12, waiting in all_reduce (hpclm.engine.step:88 in gradient_norm)",
    ]
    silent = report(states(None, REDUCE, REDUCE, REDUCE), EVERYONE, None)
    assert "rank 0 on node0 (pid 100) is blocking the others, it does not answer: its process is stopped" in silent


def positions(folder):
    """What this rank does in the middle of operations that another one holds up."""
    rank, alone = dist.get_rank(), single()
    infos = tuple(replace(alone.ranks[0], rank=other) for other in range(2))
    context = DistributedContext(World("test", rank, 2), infos, alone.watchdog)
    seen = []

    def look():
        seen.append(hang.position(context.watchdog.waits_in))

    def hold_up():  # until the other rank waits
        until(waiting.exists, "the wait of the other rank")
        look()

    def look_when_it_waits():
        until(lambda: hang.position(context.watchdog.waits_in)[1], "a wait")
        look()
        waiting.touch()

    for number, (late, operation) in enumerate(
        (
            (0, lambda: context.run_on_main(hold_up)),
            (1, lambda: context.all_gather(rank)),
            (1, lambda: context.all_reduce_max(1.0)),
            (1, dist.barrier),
        )
    ):
        waiting, watcher = Path(folder, str(number)), threading.Thread(target=look_when_it_waits)
        if rank != late:
            watcher.start()
        elif late == 1:
            hold_up()
        operation()
        if rank != late:
            watcher.join()
        context.barrier()
    return seen


def test_ranks_that_wait_for_another_are_not_its_culprits(tmp_path):
    first, second = ranks.run(2, positions, str(tmp_path))
    assert [waits_in for _, waits_in in first] == ["", "all_gather", "all_reduce", "barrier"]
    assert [waits_in for _, waits_in in second] == ["run_on_main", "", "", ""]
    for late, both in zip((0, 1, 1, 1), zip(first, second, strict=True), strict=True):
        assert culprits({rank: RankState(waits_in=waits_in) for rank, (_, waits_in) in enumerate(both)}, 2) == [late]


@pytest.mark.parametrize(
    "seconds, stages, slow",
    {
        "twice": ((0.5, 0.5, 1.0, 0.5), 1, {2: 2.0}),
        "five times": ((0.2, 0.2, 0.2, 1.0), 1, {3: 5.0}),
        "two ranks": ((0.5, 1.0), 1, {1: 2.0}),
        "all alike": ((0.9, 1.0, 0.95, 0.9), 1, {}),
        "little of the step": ((0.01, 0.05, 0.01, 0.01), 1, {}),
        "stages have unlike work": ((0.4, 0.4, 1.0, 1.0), 2, {}),
        "one of its stage": ((0.4, 0.4, 0.5, 1.0), 2, {3: 2.0}),
    }.values(),
)
def test_a_rank_is_slow_by_its_own_part_of_the_steps(seconds, stages, slow, caplog):
    noted = []
    stragglers = Stragglers(EVERYONE[: len(seconds)], lambda kind, **facts: noted.append(facts), stages)
    for step in (10, 20):
        stragglers.update([(own, 1.0) for own in seconds], step)
        rows = noted[-1]["ranks"] if noted else []
        assert {row["rank"]: row["times"] for row in rows} == pytest.approx(slow)
    assert caplog.text.count("is slow") == len(slow)


def test_a_step_that_takes_long_by_chance_is_not_the_usual_work():
    timer, took = WorkTimer(), []
    for number in range(MIN_STEPS):
        assert timer.seconds == 0.0
        began = time.perf_counter()
        timer.begin()
        with timer.reading():
            time.sleep(0.2 if number == 5 else 0.01)
        timer.end()
        took.append(time.perf_counter() - began)
    assert 0.01 <= timer.work <= timer.seconds <= sorted(took)[-2]
