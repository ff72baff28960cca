"""The process groups of a run: one of gloo with all ranks, and the groups of axes with the backend of the device."""

import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpclm import config
from hpclm import engine as engines
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext, single
from hpclm.parallel.mesh import Compute, GroupOptions, Mesh
from tests import ranks
from tests.parity import TINY
from tests.runs import until

CPU = torch.device("cpu")


def joined(store):
    """This rank among its peers, with the process group of a run in place of that of the tests."""
    rank, size, alone = dist.get_rank(), dist.get_world_size(), single()
    dist.barrier()  # a peer may still be connecting the groups before
    dist.destroy_process_group()
    world, file = World("test", rank, size), dist.FileStore(store, size)
    context = DistributedContext(world, alone.ranks * size, alone.watchdog, file)
    context.init_process_group(CPU, minutes=10)
    return context


def groups(folder, backend, names):
    """Of each of these layouts, how many groups of how many ranks this rank is in, by their backend; and how many all-reduces have
    connected them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401 - it makes the backend known

    found = {}
    for layout in names:
        words, _ = LAYOUTS[layout]
        context, run = joined(f"{folder}/{layout}"), config.load(None, [*TINY, "batch.micro_size=2", *words])
        with torch.profiler.profile() as trace:
            mesh = Mesh.build(context.rank, context.size, run.parallel, GroupOptions(backend=backend, device=CPU))
            engines.build(run.for_engine(mesh.world.size), Compute(CPU, torch.float32, mesh))
        world = dist.distributed_c10d._world
        made = Counter((world.pg_map[group][0], len(of)) for group, of in world.pg_group_ranks.items())
        found[layout] = made, sum(event.name == "c10d::allreduce_" for event in trace.events())
    return found


# Engine and layout, on 4 ranks -> the sizes of the groups of axes.
LAYOUTS = {
    "data": ([], []),
    "tensor and data": (["parallel.tensor=2"], [2, 2]),
    "pipeline and tensor": (["engine.name=pipelining", "parallel.tensor=2", "parallel.pipeline=2"], [2, 2]),
    "fsdp2, sharded within pairs": (["engine.name=fsdp2", "engine.zero_stage=3", "parallel.shard=2"], [2, 2]),
    "fairscale": (["engine.name=fairscale", "engine.zero_stage=3"], [4]),  # a second one for its reductions
}


@pytest.mark.parametrize(
    "backend, named, names",
    [
        ("fake", "fake", [*LAYOUTS]),
        (None, "gloo", ["pipeline and tensor"]),
        pytest.param(None, "gloo", [*LAYOUTS], marks=pytest.mark.whole),
    ],
    ids=["as on GPUs", "on CPUs", "on CPUs, every layout"],
)
def test_axes_have_the_devices_backend_and_every_group_is_connected_before_the_first_step(
    backend, named, names, tmp_path
):
    """PyTorch's fake backend stands for NCCL; CPUs have only gloo."""
    expected = {}
    for name in names:
        sizes = LAYOUTS[name][1]
        expected[name] = Counter([("gloo", 4), *((named, size) for size in sizes)]), 1 + len(sizes)
    assert ranks.run(4, groups, str(tmp_path), backend, names) == [expected] * 4


def waits(store):
    """What a rank gets from collectives that others join after the limit, and from one with the limit."""
    context = joined(store)
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    found = [context.run_on_main(lambda: time.sleep(2) or "written")]
    for collect in (context.all_gather, context.gather):
        time.sleep(2 * (context.rank == 1))
        found.append(collect(context.rank, unlimited=True))
    ended = Path(f"{store}-ended")
    if context.rank == 1:
        until(ended.exists, "the end of the other rank's wait")
    try:
        context.all_gather(None)
    except RuntimeError as error:
        found.append("Timed out" in str(error))
    ended.touch()
    return found


def test_only_what_may_take_hours_outlasts_the_time_limit_of_the_group(tmp_path):
    first, second = ranks.run(2, waits, str(tmp_path / "store"))
    assert first == ["written", [0, 1], [0, 1], True] and second[:3] == ["written", [0, 1], []]
