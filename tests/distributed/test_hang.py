"""What is said of hung runs and slow ranks, from what is known of them."""

import pytest

from hpclm.distributed.hang import RankState, culprits, report
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.stacks import Position
from hpclm.distributed.stragglers import Comparison, Tally

EVERYONE = [RankInfo(rank, 4, rank % 2, 2, host=f"node{rank // 2}", pid=100 + rank) for rank in range(4)]
REDUCE = Position("hpclm/engine/step.py:88 in gradient_norm", "all_reduce")
GATHER = Position("hpclm/distributed/context.py:60 in gather", "all_gather")
BACKWARD = Position("hpclm/engine/step.py:107 in accumulate", "backward")
DATA = Position("hpclm/data/batches.py:91 in _load")


def sights(*stands, **more):
    """Sights of four ranks; ``None`` for a rank that does not answer."""
    return {
        rank: RankState("step", 12, 60.0, 0.0 if stand else 61.0, position=stand, **more)
        for rank, stand in enumerate(stands)
    }


@pytest.mark.parametrize(
    "found, guilty",
    {
        "one reads, the others wait": (sights(REDUCE, REDUCE, DATA, REDUCE), [2]),
        "one reads, the others may compute": (sights(BACKWARD, DATA, BACKWARD, BACKWARD), [1]),
        "one may compute, the others wait": (sights(REDUCE, REDUCE, REDUCE, BACKWARD), [3]),
        "one waits for something else": (sights(REDUCE, GATHER, REDUCE, REDUCE), [1]),
        "one does not answer": (sights(REDUCE, REDUCE, REDUCE, None), [3]),
        "one does not answer, and another reads": (sights(REDUCE, DATA, REDUCE, None), [3]),
        "all wait alike": (sights(REDUCE, REDUCE, REDUCE, REDUCE), []),
        "halves": (sights(REDUCE, REDUCE, GATHER, GATHER), []),
    }.values(),
)
def test_who_holds_up_the_others_is_found(found, guilty):
    assert culprits(found) == guilty


def test_the_report_names_rank_node_process_place_and_who_waits_where():
    text = report(sights(REDUCE, REDUCE, DATA, REDUCE), EVERYONE, None, "the run ends")
    assert text.splitlines() == [
        "no progress for 60 s: rank 2 on node1 (pid 102) is blocking the others, in step 12, at hpclm/data/batches.py:91 in _load",
        "ranks 0-1, 3: step 12, waiting in all_reduce (hpclm/engine/step.py:88 in gradient_norm)",
        "the run ends",
    ]
    silent = report(sights(None, REDUCE, REDUCE, REDUCE), EVERYONE, None, "")
    assert "rank 0 on node0 (pid 100) is blocking the others, in step 12, no heartbeat for 61 s" in silent


def counted(*seconds, steps=10):
    """Tallies after ``steps`` steps of a second, of which each rank needed so many seconds for itself."""
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
def test_a_rank_is_slow_by_its_own_part_of_the_steps(seconds, stages, slow):
    compare = Comparison(1.5, stages)
    assert compare(counted(*[0.0 for _ in seconds], steps=0)) is None
    first, second = (counted(*seconds, steps=steps) for steps in (10, 20))
    assert compare(first) == {}  # once may be chance
    assert {rank: found.times for rank, found in compare(second).items()} == pytest.approx(slow)
    assert compare(counted(*seconds, steps=21)) is None
