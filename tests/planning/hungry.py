"""Engines that run out of memory; named in engine.name as tests.planning.hungry:Name."""

import torch

from hpclm.engine.native import NativeEngine


class OfTheGPU(NativeEngine):
    """Raises in the third step what PyTorch raises for a GPU."""

    def train_step(self, batches, lr, step, *more):
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nsee PyTorch's notes")
        return super().train_step(batches, lr, step, *more)


class OfTheMachine(NativeEngine):
    """Asks in the third step for more than any machine has."""

    def train_step(self, batches, lr, step, *more):
        if step == 2:
            torch.empty(1 << 60)
        return super().train_step(batches, lr, step, *more)
