"""What the ranks of tests/engine/test_sharded.py do."""

import ctypes
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpclm import config
from hpclm import engine as engines
from hpclm.checkpoint import CheckpointStore, Progress, Retention, begin_from
from hpclm.data.batches import Batches
from hpclm.data.synthetic import synthetic
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext, single
from hpclm.engine.native import NativeEngine
from hpclm.model.gpt import Block
from hpclm.optim.schedules import learning_rate
from hpclm.parallel.mesh import Compute, Mesh
from tests.parity import STEPS, TINY, TYPES

CPU = torch.device("cpu")


def made(words):
    """An engine, its batches and its settings, and this process's context."""
    run = config.load(None, [*TINY, *words])
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = Mesh.build(rank, size, run.parallel)
    compute = Compute(CPU, TYPES[run.engine.precision], mesh)
    engine = engines.build(run.for_engine(mesh.world.size), compute)
    source = synthetic(run.data, run.model.context, run.seed, run.model.vocab_size)
    batches = Batches(source.samples("train", 1000), run.plan(size), run.data, run.model, source.eod, compute)
    alone = single()
    infos = tuple(replace(alone.ranks[0], rank=other, host=f"node{other // 2}") for other in range(size))
    return run, engine, batches, DistributedContext(World("test", rank, size), infos, alone.watchdog)


def steps(run, engine, batches, start, stop):
    """The losses of some steps, and what became of them."""
    results = []
    for step in range(start, stop):
        rate = learning_rate(step, 1, STEPS, run.optim)
        results.append(engine.train_step(batches.step(step * run.batch.global_size), rate, step))
    return results


def goes_on(folder, stop, words):
    """Resume from a folder's newest checkpoint, evaluate, train until ``stop``, save: the losses on the way."""
    run, engine, batches, context = made(words)
    store = CheckpointStore(Path(folder), Retention(2), {}, context)
    begun = engine.evaluate(batches.take(0, 5))  # what it gathers must not outlive the loading
    progress = store.resume(engine, "auto")
    losses = [engine.evaluate(batches.take(0, 5))]
    for result in steps(run, engine, batches, progress.step, stop):
        losses.append(result.loss)
        progress = replace(
            progress,
            step=progress.step + 1,
            samples=progress.samples + run.batch.global_size,
            skipped=progress.skipped + result.skipped,
        )
    if len(losses) > 1:
        store.save(engine, progress)
    return begun, losses


def memory(words):
    """Bytes of the weights this process holds after the build, and by how much its memory grew on the way."""
    before = fresh(words)
    _, engine, _, _ = made(words)
    return sum(held.parameter.untyped_storage().nbytes() for held in engine.weights), status("VmHWM") - before


def fresh(words):
    """Bytes of memory that this process has after it built a small model; the highest so far is forgotten."""
    made([*words, "model.layers=1", "model.hidden=32", "model.vocab_size=60"])  # what is loaded only once is
    # M_MMAP_THRESHOLD: what is freed goes back, so that what counts is what lives
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def within(words, room):
    """Whether a model can be built in ``room`` bytes of memory; ask for no more is all that a process can do then."""
    fresh(words)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + room, resource.RLIM_INFINITY))
    try:
        made(words)
    except RuntimeError as error:
        assert "allocate" in str(error)
        return False
    return True


def left(folder, words):
    """Save after two steps; begin a third, leave it after some micro-batches, and save again."""

    class Left(Exception):
        pass

    def leave(done):
        if done == 2:
            raise Left

    run, engine, batches, context = made(words)
    steps(run, engine, batches, 0, 2)
    size = run.batch.global_size
    for name in ("before", "after"):
        CheckpointStore(Path(folder, name), Retention(2), {}, context).save(engine, Progress(step=2, samples=2 * size))
        if name == "before":
            with pytest.raises(Left):
                engine.train_step(batches.step(2 * size), 1e-2, 2, leave)


def begun_anew(folder, words):
    """Train two steps, take over the weights from before them and nothing else, and train them again: losses and scales."""
    run, engine, batches, context = made(words)
    CheckpointStore(Path(folder), Retention(2), {}, context).save(engine, Progress())
    first = steps(run, engine, batches, 0, 2)
    begin_from(Path(folder, "step-00000000"), engine, context, {})
    return [[(r.loss.hex(), r.loss_scale) for r in results] for results in (first, steps(run, engine, batches, 0, 2))]


class OwnBlock(Block):
    """A block that sets its weights as it likes, one of them from PyTorch's own generator."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        torch.manual_seed(4)
        self.gate = nn.Linear(config.hidden, config.hidden)
        with torch.no_grad():
            self.mlp.up.weight.mul_(3.0)

    def forward(self, x, layout):
        return x + torch.tanh(self.gate(x)) * (super().forward(x, layout) - x)


class Measured(NativeEngine):
    """The native engine with a metric of its own."""

    def update(self, loss, scale):
        return {**super().update(loss, scale), "perplexity": loss.exp()}


def status(name):
    """A figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def hooks(words):
    """How many functions autograd calls for gradients in a first step and in a fifth."""
    from fairscale.nn import FullyShardedDataParallel as Library

    run, engine, batches, _ = made(words)
    called, hook = [], Library._post_backward_hook

    def counted(self, *args):
        called.append(1)
        return hook(self, *args)

    Library._post_backward_hook = counted
    found = []
    for step in range(5):
        steps(run, engine, batches, step, step + 1)
        found.append(len(called))
        called.clear()
    return found[0], found[-1]
