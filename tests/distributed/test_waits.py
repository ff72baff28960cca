"""What a rank waits in is known, so that it is not taken for the culprit of a hang."""

import threading
import time
from dataclasses import replace

import torch.distributed as dist

from hpclm.distributed import hang
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext, single
from tests import ranks

LATE = 2.0  # seconds that one rank lets the others wait


def positions():
    """What this rank does in the middle of three operations that another one holds up."""
    rank, alone = dist.get_rank(), single()
    infos = tuple(replace(alone.ranks[0], rank=other) for other in range(2))
    context = DistributedContext(World("test", rank, 2), infos, alone.watchdog)
    found = []

    def look():
        found.append(context.watchdog.position())

    def slow():
        time.sleep(LATE)
        return None

    for late, operation in (
        (0, lambda: context.run_on_main(slow)),
        (1, lambda: context.all_gather(rank)),
        (1, lambda: context.all_reduce_max(1.0)),
    ):
        watcher = threading.Timer(LATE / 2, look)
        watcher.start()
        if rank == late and late:
            slow()
        operation()
        watcher.join()
        context.barrier()
    return found


def test_ranks_that_wait_for_another_are_not_its_culprits():
    first, second = ranks.run(2, positions)
    assert [each.collective for each in second] == ["run_on_main", "", ""]
    assert [each.collective for each in first] == ["", "all_gather", "all_reduce"]
    for late, both in zip((0, 1, 1), zip(first, second, strict=True), strict=True):
        states = {rank: hang.RankState("step", 1, 9.0, position=each) for rank, each in enumerate(both)}
        assert hang.culprits(states) == [late]
