"""What is said of hung runs and slow ranks, from what is known of them."""

import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from hpclm.distributed import hang
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext, single
from hpclm.distributed.hang import RankState, culprits, report
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.stragglers import Stragglers, Tally
from tests import ranks

EVERYONE = [RankInfo(rank, 4, rank % 2, 2, host=f"node{rank // 2}", pid=100 + rank) for rank in range(4)]
REDUCE = ("hpclm/engine/step.py:88 in gradient_norm", "all_reduce")
GATHER = ("hpclm/distributed/context.py:60 in gather", "all_gather")
BACKWARD = ("hpclm/engine/step.py:107 in accumulate", "backward")
DATA = ("hpclm/data/batches.py:91 in _load", "")
SILENT = (*REDUCE, 61.0)


def states(*positions):
    """States of four ranks."""
    return {rank: RankState("step", 12, 60.0, *position) for rank, position in enumerate(positions)}


@pytest.mark.parametrize(
    "known, blocking",
    {
        "one reads, the others wait": (states(REDUCE, REDUCE, DATA, REDUCE), [2]),
        "one reads, the others may compute": (states(BACKWARD, DATA, BACKWARD, BACKWARD), [1]),
        "one may compute, the others wait": (states(REDUCE, REDUCE, REDUCE, BACKWARD), [3]),
        "one waits for something else": (states(REDUCE, GATHER, REDUCE, REDUCE), [1]),
        "one does not answer": (states(REDUCE, REDUCE, REDUCE, SILENT), [3]),
        "one does not answer, and another reads": (states(REDUCE, DATA, REDUCE, SILENT), [3]),
        "all wait alike": (states(REDUCE, REDUCE, REDUCE, REDUCE), []),
        "halves": (states(REDUCE, REDUCE, GATHER, GATHER), []),
    }.values(),
)
def test_the_ranks_that_block_the_others_are_named(known, blocking):
    assert culprits(known) == blocking


def test_the_report_names_rank_node_process_place_and_who_waits_where():
    text = report(states(REDUCE, REDUCE, DATA, REDUCE), EVERYONE, None, "the run ends")
    assert text.splitlines() == [
        "no progress for 60 s: rank 2 on node1 (pid 102) is blocking the others, in step 12, at hpclm/data/batches.py:91 in _load",
        "ranks 0-1, 3: step 12, waiting in all_reduce (hpclm/engine/step.py:88 in gradient_norm)",
        "the run ends",
    ]
    silent = report(states(SILENT, REDUCE, REDUCE, REDUCE), EVERYONE, None, "")
    assert "rank 0 on node0 (pid 100) is blocking the others, in step 12, no heartbeat for 61 s" in silent


LATE = 2.0  # seconds that one rank lets the others wait


def positions():
    """What this rank does in the middle of operations that another one holds up."""
    rank, alone = dist.get_rank(), single()
    infos = tuple(replace(alone.ranks[0], rank=other) for other in range(2))
    context = DistributedContext(World("test", rank, 2), infos, alone.watchdog)
    seen = []

    for late, operation in (
        (0, lambda: context.run_on_main(lambda: time.sleep(LATE))),
        (1, lambda: context.all_gather(rank)),
        (1, lambda: context.all_reduce_max(1.0)),
        (1, dist.barrier),
    ):
        watcher = threading.Timer(LATE / 2, lambda: seen.append(hang.position(context.watchdog.waits_in)))
        watcher.start()
        if rank == late == 1:
            time.sleep(LATE)
        operation()
        watcher.join()
        context.barrier()
    return seen


def test_ranks_that_wait_for_another_are_not_its_culprits():
    first, second = ranks.run(2, positions)
    assert [waits_in for _, waits_in in first] == ["", "all_gather", "all_reduce", "barrier"]
    assert [waits_in for _, waits_in in second] == ["run_on_main", "", "", ""]
    for late, both in zip((0, 1, 1, 1), zip(first, second, strict=True), strict=True):
        assert culprits({rank: RankState("step", 1, 9.0, *position) for rank, position in enumerate(both)}) == [late]


def tallies(*seconds, steps):
    """Counters after ``steps`` steps of a second, of which each rank worked so many seconds."""
    return {rank: Tally(steps, own * steps, 1.0 * steps) for rank, own in enumerate(seconds)}


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
def test_a_rank_is_slow_by_its_own_part_of_the_steps(seconds, stages, slow, tmp_path, caplog):
    stragglers = Stragglers(EVERYONE, tmp_path / "ranks.json", stages)
    assert stragglers.update(tallies(*seconds, steps=4), 4) == {}  # too few steps
    assert stragglers.update(tallies(*seconds, steps=10), 10) == {}  # once may be chance
    named = stragglers.update(tallies(*seconds, steps=20), 20)
    assert {rank: row["times"] for rank, row in named.items()} == pytest.approx(slow)
    assert stragglers.update(tallies(*seconds, steps=21), 21) == named
    assert caplog.text.count("is slow") == len(slow) and (tmp_path / "ranks.json").exists() == bool(slow)
