"""Builds the model that an engine trains, or a stage of it, from the settings."""

from collections.abc import Sequence

import torch
from torch import nn

from hpclm.base.errors import ConfigError
from hpclm.config import EngineSettings, fp8
from hpclm.config.model import BLOCKS
from hpclm.config.supports import SUPPORTS, with_feature
from hpclm.model import gpt
from hpclm.model.expert_mlp import ExpertAxes
from hpclm.model.init import TensorParallelModule
from hpclm.model.layers import ColumnLinear, RowLinear
from hpclm.model.loss import Backward, TokenLoss
from hpclm.model.spec import LayerSpec
from hpclm.model.stack import Execution, Stack, WrapLayer, check_local_shapes, placements
from hpclm.parallel.fp8 import FP8
from hpclm.parallel.mesh import Compute


def defer_tp_grad_sum(model: Stack, compute: Compute) -> None:
    """On GPUs, sum the gradients of norms and biases over the tensor-parallel ranks once a step, all together, instead of six times in
    each block and micro-batch. On CPUs, where messages cost less, they are summed in every block."""
    if defers(compute.device) and compute.mesh.tp.size > 1 and model.config.block in BLOCKS:
        for module in model.modules():
            if isinstance(module, TensorParallelModule):
                module.defer_tp_grad_sum = True


def defers(device: torch.device) -> bool:
    """Whether this device defers sums over tensor-parallel ranks to the end of the step."""
    return device.type == "cuda"


def layers_of(config: EngineSettings, compute: Compute) -> list[LayerSpec]:
    """The layers of the whole model, split over tensor-parallel ranks and over the ranks that divide experts."""
    axes = ExpertAxes.of(config.parallel, compute.mesh)
    return gpt.layers(config.model, config.engine, compute.dtype, config.seed, compute.mesh.tp, axes)


def whole_model(config: EngineSettings, compute: Compute, wrap: WrapLayer, backward: Backward = "unscaled") -> Stack:
    """The whole model; each layer is passed to ``wrap`` as it is built. ``backward``: see TokenLoss."""
    return stack_of(config, compute, layers_of(config, compute), wrap, backward)


def stack_of(
    config: EngineSettings, compute: Compute, specs: Sequence[LayerSpec], wrap: WrapLayer, backward: Backward = "once"
) -> Stack:
    """Build the model, or a stage of it, from the engine's settings."""
    engine = config.engine
    loss = TokenLoss(engine.loss_chunk, bool(engine.compile), backward, config.optim.z_loss)
    supports = SUPPORTS.get(engine.name)
    in_fp8 = set[str]()
    if engine.fp8:
        in_fp8 = {f"block{number}" for number in fp8.blocks(config.model)}

    def checked(spec: LayerSpec, layer: nn.Module) -> nn.Module:
        name = spec.name
        check_local_shapes(name, layer, compute.mesh.tp)
        split = next(
            (f"{name}.{weight_name}" for weight_name, placement in placements(layer) if placement.data_ranks > 1), None
        )
        if split and not (supports and supports.splits_by_replica):
            able = with_feature(lambda can: can.splits_by_replica)
            raise ConfigError(
                f"engine {engine.name!r} does not support weights that data-parallel ranks split, such as {split} of "
                f"model.block={config.model.block}; set engine.name to one of {able}"
            )
        for module in layer.modules():
            if name in in_fp8 and isinstance(module, ColumnLinear | RowLinear):
                splits_inputs = isinstance(module, RowLinear)
                emulated = compute.device.type == "cpu"
                module.fp8 = FP8(engine.fp8 == "rowwise", module.tp, splits_inputs, emulated)
        return wrap(spec, layer)

    execution = Execution(loss, engine.recompute_every, engine.offload_activations)
    stack = Stack(config.model, specs, compute.dtype, compute.mesh, checked, execution)
    # a zero-bubble schedule runs the backward pass of weights separately, which a compiled one does not allow
    stack.compilation.may_compile_attention = engine.compile is None and config.parallel.schedule != "zero_bubble"
    return stack
