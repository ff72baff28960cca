"""A small engine, as the checkpoint store sees it."""

import torch

from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.engine import Shard

FINGERPRINT = {"model": {"layers": 2}, "seed": 1}


class State:
    """An engine as the store sees it; with ``size`` ranks each holds its own rows."""

    def __init__(self, value=0.0, rank=0, size=1):
        self.held = {"model.a": torch.full((40, 8), value), "optim.exp_avg.a": torch.arange(40.0) + value}
        self.rank, self.size = rank, size

    def tensors(self):
        for name, whole in self.held.items():
            rows = len(whole) // self.size
            start = self.rank * rows
            yield Shard(name, whole[start : start + rows], tuple(whole.shape), (start,) + (0,) * (whole.dim() - 1))

    def scalars(self):
        return {"optimizer_steps": 3, "loss_scale": None}

    def load(self, saved, scalars):
        self.held = {name: saved.whole(name) for name in saved.shapes()}
        self.loaded = scalars

    def is_of(self, step):
        """Whether every bit is as ``saved`` wrote it."""
        wanted = State(float(step)).held
        return self.held.keys() == wanted.keys() and all(torch.equal(t, wanted[name]) for name, t in self.held.items())


def store(folder, keep=3, **more):
    return CheckpointStore(folder, Retention(keep), FINGERPRINT, **more)


def progress(step):
    return Progress(step, 10 * step, 0.5, 0)


def saved(folder, numbers=(1, 2, 3), keep=3):
    """A store with these steps saved."""
    made = store(folder, keep)
    for step in numbers:
        made.save(State(float(step)), progress(step))
    return made
