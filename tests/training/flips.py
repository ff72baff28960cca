"""Bits that are flipped on purpose in the state of an engine, and what a Verifier finds."""

import hashlib
import math
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist

from hpclm.engine.checksum import held
from hpclm.engine.native import NativeEngine
from hpclm.model.gpt import Block
from hpclm.optim.schedules import learning_rate
from hpclm.training.corruption import Verifier
from tests.engine.sharded import made
from tests.parity import STEPS


def state(engine):
    """All values that this rank keeps, where it keeps them."""
    return [tensor.detach() for tensor in held(engine.state, engine.weights) if tensor.numel()]


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


class FlippingEngine(NativeEngine):
    """Flips a bit of rank 1's weights in the eighth step of a run, once."""

    def train_step(self, batches, lr, step, *others):
        """As the native engine's."""
        done = Path(os.environ["TEST_FLIPPED"])
        if step == 7 and dist.get_rank() == 1 and not done.exists():
            done.touch()
            self.weights[0].parameter.detach().view(-1).view(torch.int32)[3] ^= 1 << 12
        return super().train_step(batches, lr, step, *others)
