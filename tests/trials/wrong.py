"""Code as users write it, with one usual mistake each, which ``hpclm selftest`` must name."""

import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hpclm.config.supports import Supports
from hpclm.data.synthetic import synthetic
from hpclm.data.tokenizers import fingerprint, flat
from hpclm.engine.base import BaseEngine
from hpclm.engine.native import native_model
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.model import gpt
from hpclm.model.init import InitSpec, TensorParallelModule
from hpclm.parallel.collectives import all_reduce_in_place, copy_to_tp, gather, scatter
from hpclm.parallel.placement import Placement
from tests.optim.users import Lamb, Lion  # noqa: F401


class Scaled(gpt.Block):
    """Right: a scale for each channel, which each rank applies to its own tokens."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.tp, self.scale = tp, nn.Parameter(torch.linspace(0.5, 1.5, config.hidden))

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        return self.after(super().forward(x, metadata))

    def after(self, x):
        """What the block does besides: [t, B, C] -> [t, B, C]."""
        return x * copy_to_tp(self.scale, self.tp).to(x.dtype)


class NotCopied(Scaled):
    """The weight is not passed through copy_to_tp."""

    def after(self, x):
        """[t, B, C] -> [t, B, C]."""
        return x * self.scale.to(x.dtype)


class RunningMean(Scaled):
    """A buffer that each rank updates by its own tokens, and no checkpoint has."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.register_buffer("mean", torch.zeros(config.hidden))

    def after(self, x):
        """[t, B, C] -> [t, B, C]."""
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
        return super().after(x) - self.mean.to(x.dtype)


class OwnGenerator(Scaled):
    """Noise from a generator that goes on from step to step."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.generator = torch.Generator().manual_seed(1)

    def after(self, x):
        """[t, B, C] -> [t, B, C]."""
        noise = torch.randn(x.shape, generator=self.generator) if self.training else torch.zeros(())
        return super().after(x) + 0.1 * noise.to(x.dtype)


class Unseeded(Scaled):
    """Noise that no seed determines."""

    def after(self, x):
        """[t, B, C] -> [t, B, C]."""
        noise = torch.from_numpy(np.random.default_rng().standard_normal(x.shape)) if self.training else 0.0
        return super().after(x) + 0.1 * torch.as_tensor(noise, dtype=x.dtype)


class Noisy(Scaled):
    """Right: dropout by PyTorch's generator, which is seeded for every layer and micro-batch."""

    def after(self, x):
        """[t, B, C] -> [t, B, C]."""
        return super().after(F.dropout(x, 0.1, self.training))


class BatchNorm(Scaled):
    """Each sample's result depends on the others of its micro-batch."""

    def after(self, x):
        """[t, B, C] -> [t, B, C]."""
        return super().after(x - x.mean(1, keepdim=True))


class Projection(TensorParallelModule):
    """Right: tensor ranks split the inner features, and a bias is added once."""

    fan_in = False

    def __init__(self, config, generator, tp):
        super().__init__(tp)
        width, std = config.hidden, 0.1
        self.up = self.new_parameter("up", InitSpec.normal(Placement((2 * width, width), 0), std, generator))
        self.down = self.new_parameter("down", InitSpec.normal(Placement((width, 2 * width), 1), std, generator))
        self.bias = self.new_parameter("bias", InitSpec(Placement((width,))))

    def forward(self, x):
        """[t, B, C] -> [t, B, C]."""
        inner = F.gelu(F.linear(gather(x, self.tp), self.up.to(x.dtype)))
        return scatter(F.linear(inner, self.down.to(x.dtype)), self.tp) + self.replicated(self.bias).to(x.dtype)


class BiasOnEachRank(Projection):
    """The bias is added before scatter, which adds up what the ranks give."""

    def forward(self, x):
        """[t, B, C] -> [t, B, C]."""
        inner = F.gelu(F.linear(gather(x, self.tp), self.up.to(x.dtype)))
        return scatter(F.linear(inner, self.down.to(x.dtype), self.bias.to(x.dtype)), self.tp)


class Projected(gpt.Block):
    """Right: a block with a projection of its own."""

    projection = Projection

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.extra = self.projection(config, generator, tp)

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        x = super().forward(x, metadata)
        return x + self.extra(x)


class BiasedTwice(Projected):
    """See BiasOnEachRank."""

    projection = BiasOnEachRank


class FanInOfSlice(Scaled):
    """A weight that tensor ranks split, whose initial values have the standard deviation of the slice's fan-in."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        width = config.hidden // tp.size
        self.down = nn.Parameter(torch.randn(config.hidden, width, generator=generator) * width**-0.5)
        self.placements = {"down": Placement((config.hidden, config.hidden), 1)}

    def after(self, x):
        """[t, B, C] -> [t, B, C]."""
        whole, size = gather(x, self.tp), self.down.shape[1]
        mine = whole[..., self.tp.rank * size : (self.tp.rank + 1) * size]
        return super().after(x) + scatter(F.linear(mine, self.down.to(x.dtype)), self.tp)


class NotPlaced(FanInOfSlice):
    """A weight that tensor ranks split and that no entry of ``placements`` declares."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.placements = {}


class Counting(Scaled):
    """What it computes depends on how often it has been called, which no checkpoint has."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.calls = 0

    def after(self, x):
        """[t, B, C] -> [t, B, C]."""
        self.calls += self.training
        return super().after(x) * (1 + 0.01 * (self.calls // 2))


class Crashing(Scaled):
    """It does not work on several tensor ranks."""

    def after(self, x):
        """[t, B, C] -> [t, B, C]."""
        return super().after(x) + torch.zeros(16, 1, 1)[: len(x) * self.tp.size].view(len(x), 1, 1)


class SplitLamb(Lamb):
    """It needs whole weights, and declares that it does not."""

    splits = True


def constant(position, length, optim):
    """Right: a schedule that falls."""
    return optim.lr * (1 - position / (2 * length))


CALLS = [0]


def remembering(position, length, optim):
    """A schedule that counts its calls."""
    CALLS[0] += 1
    return optim.lr / CALLS[0]


def source(data, context, seed, vocab_size):
    """Right: made-up text."""
    return synthetic(data, context, seed, vocab_size)


def source_by_rank(data, context, seed, vocab_size):
    """A source that reads other samples on each rank, which hpclm does already."""
    return synthetic(data, context, seed + int(os.environ.get("RANK", "0")), vocab_size)


class Forgetful(BaseEngine):
    """An engine that does not sum up the gradients of the replicas."""

    def __init__(self, config, compute):
        model = native_model(config, compute)
        weights = [
            ShardedParameter(name, p, model.placements[name], replicas=compute.mesh.dp) for name, p in model.weights()
        ]
        super().__init__(config, compute, model, weights)


class Engine(Forgetful):
    """Right: it does, and says that it can do nothing else."""

    supports = Supports("tests.trials.wrong:Engine")

    def finish_backward(self):
        """The loss is weighted, so that the sum over the replicas is the mean over the batch."""
        all_reduce_in_place([w.parameter.grad for w in self.weights if w.parameter.grad is not None], self.mesh.dp)


class Bytes:
    """Right: a tokenizer."""

    size, eod = 257, 256

    def __init__(self, files):
        self.fingerprint = fingerprint("bytes", files, self.size, self.eod)

    def encode(self, text):
        """Ids."""
        return list(text.encode())

    def encode_batch(self, texts):
        """Ids of many texts."""
        return flat([self.encode(text) for text in texts])

    def decode(self, ids):
        """The text of ids."""
        return bytes(ids).decode()


class Lower(Bytes):
    """It does not give back what it was given."""

    def encode(self, text):
        """Ids."""
        return super().encode(text.lower())


class Lines:
    """Right: a sink."""

    def __init__(self, run):
        self.path = run.out / "lines.txt"

    def send(self, rows, before):
        """Add rows."""
        kept = self.path.read_text().splitlines()[:before] if before else []
        self.path.write_text("".join(f"{line}\n" for line in [*kept, *(str(row["step"]) for row in rows)]))

    def close(self, code):
        """Nothing."""
