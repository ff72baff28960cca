"""An engine whose backward pass and optimizer are ours; what wraps the model is passed in."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from hpclm.config import RunConfig
from hpclm.data.batches import Batch
from hpclm.engine import Saved, Shard, StepResult, go_on
from hpclm.engine.held import decay_groups, read, shards
from hpclm.engine.step import Replica, Work, accumulate, gradient_norm, mean_loss, seed_step, seeds, token_weights
from hpclm.model import gpt
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Place, Stack, Stages, check_shapes
from hpclm.optim.adamw import adamw, forget, groups, restore, steps_taken, update
from hpclm.optim.scaler import LossScale
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Mesh

MOMENTS = ("exp_avg", "exp_avg_sq")


class PlainEngine:
    """One model and one optimizer for each replica: fp32 weights and optimizer state, activations in the compute type."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, device: torch.device, model: Stack | Stages, wrap: Callable[[Any], Replica]
    ):
        self.config, self.mesh, self.device, self.model = config, mesh, device, model
        self.replica = wrap(model)
        decaying, others = decay_groups(self.replica.held, config.optim.decayed == "all")
        self.optimizer = adamw(groups(decaying, others, config.optim), config.optim)
        self.scale = LossScale.first(config.scaler) if model.dtype == torch.float16 else None

    def train_step(
        self, batches: Sequence[Batch], lr: float, step: int, between: Callable[[int], None] = go_on
    ) -> StepResult:
        """Forward and backward over the micro-batches, clip, update; leaves the weights alone when it is not finite."""
        config, mesh, replica = self.config, self.mesh, self.replica
        scale = self.scale.value if self.scale else 1.0
        seed_step(config.seed, step, mesh.world.rank)
        self.model.train()
        random = gpt.random(config.model)
        found = seeds(config.seed, step, len(batches), mesh.dp) if random else [None] * len(batches)
        work = Work(batches, token_weights(batches, config.batch.loss_norm, mesh.dp), found, between)
        factor = scale * (mesh.dp.size if replica.mean else 1)
        # an overflow of fp16 is no anomaly: the loss scale answers it
        with torch.autograd.set_detect_anomaly(config.engine.anomaly, check_nan=self.scale is None):
            loss = all_reduce(accumulate(replica, work, factor), mesh.dp)
        norm = gradient_norm(replica.held, mesh, replica.sharded)
        bad = (~torch.isfinite(norm + loss)).float()
        update(self.optimizer, lr, norm, config.optim.clip, scale, bad)
        for held in replica.held:
            held.parameter.grad = None
        self.optimizer.zero_grad(set_to_none=True)
        mean, length, skipped = torch.stack([loss, norm / scale, bad]).tolist()  # the step's one wait for the device
        if self.scale:
            self.scale = self.scale.after(not math.isfinite(length), config.scaler)
        return StepResult(mean, length, scale, bool(skipped))

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token."""
        self.model.eval()
        loss = mean_loss(self.replica.forward, batches, self.device, self.mesh.dp)
        self.replica.rest()
        return loss

    @torch.no_grad()
    def tensors(self) -> Iterator[Shard]:
        """Weights, and Adam's moments once there are any."""
        for number, held in enumerate(self.replica.held):
            yield from shards(held, f"model.{held.name}", held.parameter.detach(), self.mesh, number)
            state = self.optimizer.state.get(held.parameter, {})
            for moment in MOMENTS:
                if moment in state:
                    yield from shards(held, f"optim.{moment}.{held.name}", state[moment], self.mesh, number)

    def scalars(self) -> dict[str, Any]:
        """Adam's step count, and the loss scale."""
        scale = self.scale and {
            "value": self.scale.value,
            "hysteresis": self.scale.hysteresis,
            "good_steps": self.scale.good_steps,
        }
        return {"optimizer_steps": steps_taken(self.optimizer), "loss_scale": scale}

    @torch.no_grad()
    def load(self, saved: Saved, scalars: dict[str, Any]) -> None:
        """Take over a saved state."""
        given = {name.removeprefix("model."): shape for name, shape in saved.shapes().items() if name[:6] == "model."}
        elsewhere = given.keys() - self.model.forms.keys() if self.mesh.pp.size > 1 else set()
        check_shapes(self.model.forms, {name: shape for name, shape in given.items() if name not in elsewhere})
        steps = scalars["optimizer_steps"]
        for held in self.replica.held:
            own = held.parameter
            own.copy_(read(held, f"model.{held.name}", saved, self.mesh.tp))
            if steps:
                moments = {
                    m: torch.empty_like(own).copy_(read(held, f"optim.{m}.{held.name}", saved, self.mesh.tp))
                    for m in MOMENTS
                }
                restore(self.optimizer, own, moments, steps)
            else:
                forget(self.optimizer, own)
        if self.scale:
            self.scale = LossScale.of(scalars["loss_scale"], self.config.scaler)


def whole_model(config: RunConfig, mesh: Mesh, dtype: torch.dtype, place: Place) -> Stack:
    """All layers of the model, each given to ``place`` as it is built."""
    engine = config.engine
    specs = gpt.layers(config.model, engine, dtype, config.seed, mesh.tp)
    loss = TokenLoss(engine.loss_chunk, compile=engine.compile)
    offload = engine.offload_activations
    return Stack(config.model, specs, dtype, mesh.tp, loss, engine.recompute_every, place, offload)
