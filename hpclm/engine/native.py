"""Plain PyTorch, one model a process: fp32 weights and optimizer, activations in the compute type.

Several processes are replicas, whose gradients DistributedDataParallel sums while the last micro-batch is under way.
"""

import math
import shutil
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpclm.cluster.team import Team
from hpclm.config import RunConfig
from hpclm.data.batches import Batch
from hpclm.engine import Shard, StepResult
from hpclm.engine.step import Replica, accumulate, mean_loss, seed_step, token_weights
from hpclm.errors import ConfigError
from hpclm.model import gpt
from hpclm.model.loss import TokenLoss
from hpclm.optim.adamw import adamw, gradient_norm, update
from hpclm.optim.scaler import LossScale

MOMENTS = ("exp_avg", "exp_avg_sq")


class NativeEngine:
    """One model, one optimizer, one device; the same on every rank of the team."""

    def __init__(self, config: RunConfig, team: Team, device: torch.device, dtype: torch.dtype):
        self.config, self.team, self.device = config, team, device
        specs = gpt.layers(config.model, config.engine, dtype, config.seed)
        self.model = gpt.Stack(config.model, specs, config.engine.recompute_every).to(device)
        self.loss = TokenLoss(config.engine.loss_chunk, compile=config.engine.compile)
        self.optimizer = adamw(self.model, config.optim)
        self.scale = LossScale.first(config.scaler) if dtype == torch.float16 else None
        if config.engine.compile:
            self._compile()

    @cached_property
    def replica(self) -> Replica:
        """The model as this rank trains it. Made at the first step: making it is the first thing that needs the others."""
        return Replica.alone(self.model) if self.team.size == 1 else Replica.among_others(self.model, self.device)

    def _compile(self) -> None:
        compiler = next(filter(shutil.which, ("g++", "clang++", "gcc")), None)
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not compiler or not header.exists():
            missing = str(header) if compiler else "a C++ compiler on the PATH"
            raise ConfigError(
                f"engine.compile=true needs {missing}, which is not there; set engine.compile=false, "
                f"or install it (Debian: apt-get install g++ python3-dev)"
            )
        for name, layer in self.model.layers.items():
            if name.startswith("block"):
                layer.compile(dynamic=False)

    def train_step(self, batches: Sequence[Batch], lr: float, step: int) -> StepResult:
        """Forward and backward over the micro-batches, clip, update; leaves the weights alone when it is not finite."""
        scale = self.scale.value if self.scale else 1.0
        seed_step(self.config.seed, step, self.team.rank)
        self.model.train()
        weights = token_weights(batches, self.config.batch.loss_norm, self.team)
        # an overflow of fp16 is no anomaly: the loss scale answers it
        with torch.autograd.set_detect_anomaly(self.config.engine.anomaly, check_nan=self.scale is None):
            loss = self.team.total(accumulate(self.replica, self.loss, batches, weights, scale))
        norm = gradient_norm(self.model.parameters())
        bad = (~torch.isfinite(norm + loss)).float()
        update(self.optimizer, lr, norm, self.config.optim.clip, scale, bad)
        self.optimizer.zero_grad(set_to_none=True)
        mean, length, skipped = torch.stack([loss, norm / scale, bad]).tolist()  # the step's one wait for the device
        if self.scale:
            self.scale = self.scale.after(not math.isfinite(length), self.config.scaler)
        return StepResult(mean, length, scale, bool(skipped))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token."""
        self.model.eval()
        return mean_loss(self.model, self.loss, batches, self.team)

    def tensors(self) -> dict[str, Shard]:
        """Weights, and Adam's moments once there are any."""
        found = {f"model.{name}": Shard.whole(p.detach()) for name, p in self.model.weights()}
        for name, p in self.model.weights():
            for moment in MOMENTS:
                if moment in self.optimizer.state[p]:
                    found[f"optim.{moment}.{name}"] = Shard.whole(self.optimizer.state[p][moment])
        return found

    def scalars(self) -> dict[str, Any]:
        """Adam's step count, and the loss scale."""
        steps = [state["step"].item() for state in self.optimizer.state.values() if "step" in state]
        scale = self.scale and {
            "value": self.scale.value,
            "hysteresis": self.scale.hysteresis,
            "good_steps": self.scale.good_steps,
        }
        return {"optimizer_steps": int(steps[0]) if steps else 0, "loss_scale": scale}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        steps = scalars["optimizer_steps"]
        self.model.load_weights({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
        for name, p in self.model.weights():
            if steps:
                moments = {m: torch.empty_like(p).copy_(tensors[f"optim.{m}.{name}"]) for m in MOMENTS}
                self.optimizer.state[p] = {"step": torch.tensor(float(steps), device=self.device), **moments}
        if self.scale and scalars["loss_scale"]:
            self.scale = LossScale(**scalars["loss_scale"])
