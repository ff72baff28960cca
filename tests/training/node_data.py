"""What the ranks of tests/training/test_node_data.py do: open a run's data, and say which files they read."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.data import index_cache, indexed
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext, single
from hpclm.parallel.mesh import Compute, Mesh
from hpclm.training.run_data import open_data
from hpclm.training.start import RunStart


def reads(folders, words):
    """The names of the files that this rank opens below its node's folder, how many it hashes, and its first samples.

    ``folders``: the working directory of each rank; ranks with the same one are on the same node.
    """
    rank, size, alone = dist.get_rank(), dist.get_world_size(), single()
    os.chdir(folders[rank])
    names = [Path(folder).name for folder in folders]
    infos = tuple(replace(alone.ranks[0], rank=each, host=name, machine=name) for each, name in enumerate(names))
    context = DistributedContext(World("test", rank, size), infos, alone.watchdog)
    opened, hashed = set(), []

    def watch(event, args):
        if event == "open" and isinstance(args[0], str) and not args[0].startswith(("/", ".")):
            opened.add(Path(args[0]).name)

    def counted(content):
        hashed.append(len(content))
        return fingerprint(content)

    fingerprint = indexed.fingerprint
    indexed.fingerprint = index_cache.fingerprint = counted
    sys.addaudithook(watch)
    run = config.load(None, words)
    compute = Compute(torch.device("cpu"), torch.float32, Mesh.build(rank, size, run.parallel))
    start = RunStart(run, processes=size)
    context.run_on_main(start.check)
    with open_data(run, context, compute, start) as data:
        source, train, held = data.source, data.train, data.held_out
        rows = np.empty((3, run.model.context + 1), train.samples.dtype)
        for index, row in enumerate(rows):
            train.samples.read(index, row)
    return sorted(opened), len(hashed), rows.tolist(), source.fingerprint, source.eod, len(held)


def refusal(folders, words):
    """What this rank raises, and whether all raise it."""
    with pytest.raises(ConfigError) as error:
        reads(folders, words)
    return str(error.value), error.value.shared
