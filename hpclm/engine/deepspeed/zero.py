"""ZeRO without a pipeline: what the replicas share out of optimizer state, gradients and weights."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from hpclm.config import RunConfig
from hpclm.config.deepspeed import settings, stage_of
from hpclm.data.batches import Batch
from hpclm.engine import Saved, Shard, StepResult
from hpclm.engine.deepspeed import library
from hpclm.engine.deepspeed.state import State
from hpclm.engine.held import Held, decay_groups
from hpclm.engine.plain import PlainEngine
from hpclm.engine.step import Replica, mean_loss, seed_step, seeds, token_weights
from hpclm.model import gpt
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Place, Stack, check_shapes
from hpclm.optim.adamw import groups
from hpclm.optim.scaler import LossScale
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Mesh


def stack(config: RunConfig, mesh: Mesh, dtype: torch.dtype, place: Place) -> Stack:
    """The whole model."""
    engine = config.engine
    model = Stack(
        config.model,
        gpt.layers(config.model, engine, dtype, config.seed, mesh.tp),
        dtype,
        mesh.tp,
        TokenLoss(engine.loss_chunk, compile=engine.compile),
        engine.recompute_every,
        place,
    )
    if engine.compile:
        model.compile_blocks()
    return model


class ReplicatedEngine(PlainEngine):
    """Stage 0: every replica has everything, and DeepSpeed sums the gradients. Clipping and the update are ours: its own
    know nothing of a step that is not finite."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        library.begin(device)
        tree = settings(config, config.plan(mesh.world.size), library.NAMES[dtype])
        model = stack(config, mesh, dtype, lambda _, layer: layer.to(device))

        def wrap(model: Stack) -> Replica:
            self.engine = library.initialize(model=model, config=tree, mpu=library.MeshView(mesh))
            self.engine.enable_backward_allreduce = False  # once a step is enough
            held = tuple(Held(name, p, model.forms[name]) for name, p in model.weights())
            return Replica(self.engine, held, mean=True, finish=self._reduce, backward=self._backward)

        super().__init__(config, mesh, device, model, wrap)
        self.engine.optimizer = self.optimizer

    def _backward(self, loss: Tensor) -> None:
        # a tensor of its own: the hook on what its forward gave would divide by the micro-batches all the same
        self.engine.backward(loss * 1.0, scale_wrt_gas=False)

    def _reduce(self) -> None:
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients(bucket_size=self.engine.zero_reduce_bucket_size())


class ZeroEngine:
    """Stages 1 to 3: DeepSpeed's own optimizer around ours, with fp32 weights and moments."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        library.begin(device)
        self.config, self.mesh, self.device = config, mesh, device
        tree, view = settings(config, config.plan(mesh.world.size), library.NAMES[dtype]), library.MeshView(mesh)
        place: Place = partition(tree, view, dtype) if stage_of(config) == 3 else (lambda _, layer: layer.to(device))
        self.model = stack(config, mesh, dtype, place)
        self.held = tuple(Held(name, p, self.model.forms[name]) for name, p in self.model.weights())
        library.mark_split(self.held)
        decaying, others = decay_groups(self.held, config.optim.decayed == "all")
        optimizer = library.optimizer(groups(decaying, others, config.optim), config.optim)
        self.engine = library.initialize(model=self.model, optimizer=optimizer, config=tree, mpu=view)
        self.state = State(self.engine.optimizer, optimizer)
        self.scale = LossScale.first(config.scaler) if dtype == torch.float16 else None

    def train_step(self, batches: Sequence[Batch], lr: float, step: int) -> StepResult:
        """Forward and backward over the micro-batches; DeepSpeed reduces, clips, updates, and skips what is not finite."""
        config, mesh, engine = self.config, self.mesh, self.engine
        scale = self.scale.value if self.scale else 1.0
        if self.scale:
            engine.optimizer.override_loss_scale(scale)
        seed_step(config.seed, step, mesh.world.rank)
        engine.train()
        random = gpt.random(config.model)
        found = seeds(config.seed, step, len(batches), mesh.dp) if random else [None] * len(batches)
        weights = token_weights(batches, config.batch.loss_norm, mesh.dp)
        factor = scale * mesh.dp.size  # it takes the mean over the replicas
        total = torch.zeros((), device=self.device)
        with torch.autograd.set_detect_anomaly(config.engine.anomaly, check_nan=self.scale is None):
            for number, (batch, weight, seed) in enumerate(zip(batches, weights, found, strict=True)):
                engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
                tokens, labels, _, positions, documents = batch
                value = engine(tokens, positions, documents, labels, weight * factor, seed)
                # the scale is in the weights already, where fp16 needs it
                engine.backward(finite_or_nan(value) / scale, scale_wrt_gas=False)
                total += value.detach() / factor
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        engine.step()
        skipped = bool(engine.optimizer.overflow)
        if self.scale:
            self.scale = self.scale.after(skipped, config.scaler)
        return StepResult(all_reduce(total, mesh.dp).item(), float(engine.get_global_grad_norm()), scale, skipped)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token."""
        self.engine.eval()
        return mean_loss(self.engine, batches, self.device, self.mesh.dp)

    @torch.no_grad()
    def tensors(self) -> Iterator[Shard]:
        """Weights, and Adam's moments once there are any."""
        yield from self.state.tensors(self.held, self.mesh)

    def scalars(self) -> dict[str, Any]:
        """Adam's step count, and the loss scale."""
        return {"optimizer_steps": self.state.steps(), "loss_scale": self.scale and vars(self.scale).copy()}

    @torch.no_grad()
    def load(self, saved: Saved, scalars: dict[str, Any]) -> None:
        """Take over a saved state."""
        given = {name.removeprefix("model."): shape for name, shape in saved.shapes().items() if name[:6] == "model."}
        check_shapes(self.model.forms, given)
        self.state.load(self.held, saved, scalars["optimizer_steps"], self.mesh)
        if self.scale and scalars["loss_scale"]:
            self.scale = LossScale(**scalars["loss_scale"])


def finite_or_nan(loss: Tensor) -> Tensor:
    """``loss``; where it is not finite its gradients are not either, so that the step is skipped."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def partition(tree: dict[str, Any], view: library.MeshView, dtype: torch.dtype) -> Place:
    """Stage 3: leaves of a layer, right after it is built, only this replica's part here."""
    shared: dict[str, Any] = {}  # what all layers have in common: weights on a disk, groups inside the replicas

    def place(_: str, layer: nn.Module) -> nn.Module:
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype)
        with library.refusals():
            made = deepspeed.zero.Init(
                module=layer,
                data_parallel_group=view.get_data_parallel_group(),
                config_dict_or_path=tree,  # with the type: what is passed as dtype counts on some devices only
                mpu=view,
                **shared,
            )
        shared.update(param_swapper=made.param_swapper, zero_param_parallel_group=made.zero_param_process_group)
        return layer

    return place
