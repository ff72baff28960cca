"""ZeRO without a pipeline: what the replicas share out of optimizer state, gradients and weights."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from hpclm.config import RunConfig
from hpclm.config.deepspeed import settings, stage_of
from hpclm.data.batches import Batch
from hpclm.engine import StepResult, go_on
from hpclm.engine.deepspeed import library
from hpclm.engine.deepspeed.state import State, Wrapped
from hpclm.engine.held import Held, decay_groups
from hpclm.engine.plain import PlainEngine
from hpclm.engine.step import Replica, mean_loss, seed_step, seeds, token_weights
from hpclm.model import gpt
from hpclm.model.draw import on, shapes
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Place, Stack
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
        model = stack(config, mesh, dtype, on(device, mesh.tp))

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


class ZeroEngine(Wrapped):
    """Stages 1 to 3: DeepSpeed's own optimizer around ours, with fp32 weights and moments."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype):
        library.begin(device)
        self.config, self.mesh, self.device = config, mesh, device
        tree, view = settings(config, config.plan(mesh.world.size), library.NAMES[dtype]), library.MeshView(mesh)
        place = partition(tree, view, dtype) if stage_of(config) == 3 else on(device, mesh.tp)
        self.model = stack(config, mesh, dtype, place)
        self.held = tuple(Held(name, p, self.model.forms[name]) for name, p in self.model.weights())
        library.mark_split(self.held)
        decaying, others = decay_groups(self.held, config.optim.decayed == "all")
        optimizer = library.optimizer(groups(decaying, others, config.optim), config.optim)
        self.engine = library.initialize(model=self.model, optimizer=optimizer, config=tree, mpu=view)
        self.state = State(self.engine.optimizer, optimizer)
        self.scale = LossScale.first(config.scaler) if dtype == torch.float16 else None

    def train_step(
        self, batches: Sequence[Batch], lr: float, step: int, between: Callable[[int], None] = go_on
    ) -> StepResult:
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
                if number:
                    between(number)
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


def finite_or_nan(loss: Tensor) -> Tensor:
    """``loss``; where it is not finite its gradients are not either, so that the step is skipped."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


class Init(deepspeed.zero.Init):
    """Leaves of a layer only this replica's part here, and draws that part of a weight that is a shape only.

    DeepSpeed's own wants each weight whole everywhere, and sends all replicas what the first has.
    """

    def __init__(self, layer: nn.Module, view: library.MeshView, dtype: torch.dtype, **arguments: Any):
        found = dict(shapes(layer))
        self.drawn = {p: found[name] for name, p in layer.named_parameters() if name in found}
        self.tp, self.type = view.mesh.tp, dtype
        group = view.get_data_parallel_group()
        super().__init__(module=layer, data_parallel_group=group, mpu=view, **arguments)

    def _convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        for weight in list(param_list):
            if (
                weight in self.drawn
            ):  # room for all of it, for a moment; on a CPU only addresses, since nobody writes there
                there = torch.empty(weight.shape, dtype=self.type, device=self.local_device)
                torch.utils.swap_tensors(weight, nn.Parameter(there))
            else:
                weight.data = weight.data.to(self.local_device, self.type)
            self._zero_init_param(weight)

    def _zero_init_param(self, param: Any) -> None:
        if param not in self.drawn:
            super()._zero_init_param(param)
            return
        self._convert_to_deepspeed_param(param)
        size = self._aligned_size(param) // self._partition_world_size(param)
        begin = size * self._partition_rank(param)
        if self.zero_param_process_group:  # parts of another size are cut out of it too
            begin, size = 0, param.ds_numel
        self.drawn[param].fill(param.data.view(-1)[begin : begin + size], begin, self.tp)
        param.partition()


def partition(tree: dict[str, Any], view: library.MeshView, dtype: torch.dtype) -> Place:
    """Stage 3: leaves of a layer, right after it is built, only this replica's part here."""
    shared: dict[str, Any] = {}  # what all layers have in common: weights on a disk, groups inside the replicas

    def place(_: str, layer: nn.Module) -> nn.Module:
        # with the type in the JSON: what is passed as dtype counts on some devices only
        with library.refusals():
            made = Init(layer, view, dtype, config_dict_or_path=tree, **shared)
        shared.update(param_swapper=made.param_swapper, zero_param_parallel_group=made.zero_param_process_group)
        return layer

    return place
