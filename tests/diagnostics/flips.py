"""Bits that are flipped on purpose in the state of an engine, and what a Verifier finds."""

import hashlib
import math
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist

from hpclm.diagnostics.corruption import Verifier
from hpclm.engine.checksum import local_tensors
from hpclm.engine.native import NativeEngine
from hpclm.model.gpt import Block
from hpclm.optim.schedules import learning_rate
from tests.engine.sharded import made
from tests.parity import STEPS


def state(engine):
    """All values that this rank keeps, where it keeps them."""
    tensors = [*local_tensors(engine, engine.weights, shared=False)]
    if engine.router_state:
        tensors += [engine.router_state.bias, engine.router_state.load]
    return [tensor.detach() for tensor in tensors if tensor.numel()]


def flip(engine, draw):
    """Flip one bit of weights or optimizer state, of a value and at a place that the draw chooses."""
    tensor = draw.choice(state(engine)).view(-1).view(torch.int32)
    tensor[draw.randrange(len(tensor))] ^= draw.choice([1 << bit for bit in range(31)] + [-(1 << 31)])


def trial(engine, batches, run, verifier, first, every, act):
    """Some steps, and what is found after them; ``act(step, done)`` is called before each step and between its micro-batches."""
    for step in range(first, first + every):
        act(step, 0)
        inputs = batches.step(step * run.batch.global_size)
        rate = learning_rate(step, 1, STEPS, run.optim)
        engine.train_step(inputs, rate, step, lambda done, step=step: act(step, done))
        verifier.after_step(inputs[0])
    return [(each.ranks, each.certain) for each in verifier.check()]


def flipped(words, seeds, every, share=math.inf, earliest=0, within=True):
    """For each seed the rank on which a bit was flipped, what was found, and whether any state is not what it is without that.

    ``within``: bits are flipped within steps too, between micro-batches."""
    run, engine, batches, context = made(words)
    begun, results, undisturbed = [], [], None
    for seed in (None, None, *seeds):  # from its beginning, then from where it is then
        draw = random.Random(seed or 0)
        victim, step, done = (
            draw.randrange(context.size),
            every + draw.randrange(earliest, every),
            draw.randrange(1 + within),
        )
        pending = [draw] if context.rank == victim and seed is not None else []

        def act(now, micro_batches, step=step, done=done, pending=pending):
            if pending and now == step and micro_batches >= done:
                flip(engine, pending.pop())

        verifier = Verifier(engine, engine.mesh, context, share)
        found = trial(engine, batches, run, verifier, every if begun else 0, every, act)
        assert not pending
        if not begun:
            begun = [tensor.clone() for tensor in state(engine)]
            assert found == []
            continue
        digests = context.all_gather([hashlib.sha256(tensor.numpy()).hexdigest() for tensor in state(engine)])
        undisturbed = undisturbed or digests
        results.append((victim, found, digests != undisturbed))
        for tensor, value in zip(state(engine), begun, strict=True):
            tensor.copy_(value)
        getattr(engine.state, "publish", engine.refresh)()
    (_, found, differs), *others = results
    assert (found, differs) == ([], False)
    return others


def miscomputed(words, victim):
    """What is found where a rank computes the same twice with two results."""
    run, engine, batches, context = made(words)
    calls = []

    def spoil(module, inputs, output):
        calls.append(1)
        if not module.training and len(calls) % 2:
            output.view(-1).view(torch.int32)[0] ^= 1 << 20

    if context.rank == victim:
        next(module for module in engine.model.modules() if isinstance(module, Block)).register_forward_hook(spoil)
    return trial(engine, batches, run, Verifier(engine, engine.mesh, context), 0, 2, lambda *_: None)


def undisturbed(words, every):
    """Losses and the final state with checks and without."""
    answers = []
    for checks in (True, False):
        run, engine, batches, context = made([*words])
        verifier = Verifier(engine, engine.mesh, context, math.inf) if checks else None
        losses = []
        for step in range(2 * every):
            inputs = batches.step(step * run.batch.global_size)
            losses.append(engine.train_step(inputs, 1e-3, step).loss.hex())
            if verifier:
                verifier.after_step(inputs[0])
                assert (step + 1) % every or verifier.check() == []
        answers.append((losses, [tensor.clone() for tensor in state(engine)]))
    (losses, tensors), (others, values) = answers
    return losses == others and all(map(torch.equal, tensors, values))


def flipping_memory(engine_class=NativeEngine):
    """Have a bit of rank 1's weights flip in the eighth step of a run, once, as if the memory did it: no setting says so."""
    train_step = engine_class.train_step

    def flips(self, batches, lr, step, *others):
        done = Path(os.environ["TEST_FLIPPED"])
        if step == 7 and dist.get_rank() == 1 and not done.exists():
            done.touch()
            self.weights[0].parameter.detach().view(-1).view(torch.int32)[3] ^= 1 << 12
        return train_step(self, batches, lr, step, *others)

    engine_class.train_step = flips


SITE = """
import importlib.abc, importlib.util, sys

class Flips(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "hpclm.engine.native":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_flip(module):
            load(module)
            from tests.diagnostics import flips
            flips.flipping_memory(module.NativeEngine)

        spec.loader.exec_module = load_and_flip
        return spec

sys.meta_path.insert(0, Flips())
"""
"""A sitecustomize.py by which the ranks of a job have such memory."""


class OneSided(Block):
    """A block with a weight that tensor-parallel ranks hold whole, whose gradient nobody sums over them."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.scale = torch.nn.Parameter(torch.ones(config.hidden))

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        return super().forward(x, metadata) * self.scale


class Wandering(Block):
    """A block that changes a weight while it computes."""

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        with torch.no_grad():
            self.mlp.up.weight.add_(1e-3)
        return super().forward(x, metadata)


class Drawing(Block):
    """A block that draws random numbers of its own, also in evaluation."""

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        return super().forward(x, metadata) * (1 + 0.01 * torch.rand(()))


def constant_rate(position, length, optim):
    """A schedule that is in order."""
    return 1e-3


def rate_of_rank(position, length, optim):
    """A schedule whose rates differ between ranks."""
    return 1e-3 * (1 + dist.get_rank())


class OwnEngine(NativeEngine):
    """An engine of one's own whose updates differ between ranks."""

    def train_step(self, batches, lr, step, *others):
        """As the native engine's."""
        return super().train_step(batches, lr * (1 + dist.get_rank()), step, *others)
