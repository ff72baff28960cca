"""Copies of the weights of linear layers and norms in the compute type, cast once a step from the optimizer's fp32 weights.

Forward passes then cast no weights. Each gradient arrives in the compute type, is added to the fp32 gradient in place, and is freed, so
a micro-batch needs no separate fp32 gradient buffer. The sums equal those of casting in every forward pass, bit for bit.

On GPUs the backward pass itself adds the gradients of matrices and tables to the fp32 gradients (hpclm.parallel.main_gradients), which
are then never rounded to the compute type. When compiled, it also adds the gradients of biases and norms, in the kernels that compute them.
Gradients of experts are added afterwards: up to PyTorch 2.13, grouped_mm neither accumulates into its result nor multiplies bf16
matrices into an fp32 one.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from hpclm.config import EngineConfig, ModelConfig
from hpclm.config.model import BLOCKS
from hpclm.model.expert_mlp import Experts
from hpclm.model.init import TensorParallelModule
from hpclm.model.layers import ColumnLinear, Norm, RowLinear, VocabParallelEmbedding, WholeLinear
from hpclm.model.stack import Stack


class ComputeCopies:
    """The copies in the model, and the fp32 weights they are cast from."""

    def __init__(self, model: Stack, in_place: bool = False):
        """``in_place``: the backward pass accumulates into the fp32 gradients where it can."""
        self._added: dict[nn.Parameter, tuple[TensorParallelModule, str]] = {}
        """Copy -> its module and name there, if the backward pass accumulates the gradient in place."""
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        """The fp32 weight behind each parameter of the model that is a copy."""
        self.tables: list[VocabParallelEmbedding] = []
        """Modules that also compute with the fp32 weight, and so keep a copy beside it."""
        if model.dtype == torch.float32:
            return
        # weak, because the garbage collector does not see references from parameter hooks
        collect = WeakMethod(self._collect)
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding) and not in_place:
                module.rows = module.weight.detach().to(model.dtype)
                self.tables.append(module)
            elif isinstance(module, ColumnLinear | RowLinear | WholeLinear | Norm | VocabParallelEmbedding | Experts):
                for name, weight in _castable(module):
                    copy = nn.Parameter(weight.detach().to(model.dtype), weight.requires_grad)
                    setattr(module, name, copy)
                    self.masters[copy] = weight
                    if not weight.requires_grad:
                        continue
                    matrix = weight.ndim == 2 and name == "weight"
                    # uncompiled, an autograd function for each small weight costs more than adding its gradient
                    small = weight.ndim == 1 and model.compilation.layers
                    if in_place and (matrix or small):
                        self._added[copy] = module, name
                    else:
                        copy.register_post_accumulate_grad_hook(partial(_call, collect))

    def attach(self) -> None:
        """Give the modules the fp32 gradients, which the engine has placed or which are allocated now."""
        for copy, (module, name) in self._added.items():
            master = self.masters[copy]
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            # .data has a separate version counter, unlike other views of a bucket
            module.main_grads[name] = master.grad.data

    def master(self, parameter: nn.Parameter) -> nn.Parameter:
        """The optimizer's fp32 parameter for a parameter of the model."""
        return self.masters.get(parameter, parameter)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the changed fp32 weights into the copies."""
        _cast([*self.masters.items(), *self._rows()])

    @torch.no_grad()
    def refresh_whole(self) -> None:
        """Cast only what replicas do not shard: tables, since the model also computes with their fp32 weights, and frozen weights."""
        frozen = [(copy, weight) for copy, weight in self.masters.items() if not weight.requires_grad]
        _cast([*frozen, *self._rows()])

    def _rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((table.rows, table.weight) for table in self.tables if table.rows is not None)

    def _collect(self, copy: Tensor) -> None:
        """Add the gradient of one backward pass to the fp32 gradient."""
        master = self.masters[copy]  # type: ignore[index]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        master.grad.add_(copy.grad)  # type: ignore[arg-type]
        copy.grad = None


def adds_in_place(engine: EngineConfig, model: ModelConfig, device: torch.device) -> bool:
    """Whether backward passes accumulate into the fp32 gradients: on GPUs, in hpclm's own blocks.

    CPUs cannot multiply two bf16 matrices into an fp32 one. Offloading would move the fp32 gradients with the activations, since the
    forward pass saves both.
    """
    return (
        device.type == "cuda"
        and model.block in BLOCKS
        and not (torch.is_anomaly_enabled() or engine.offload_activations)
    )


def _call(method: WeakMethod[Any], copy: Tensor) -> None:
    """The gradient hook of a copy."""
    collect = method()
    if collect is not None:
        collect(copy)


def _cast(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        copies, weights = zip(*pairs, strict=True)
        # one call for all: small kernels launched one by one would leave the GPU idle
        torch._foreach_copy_([copy.detach() for copy in copies], [weight.detach() for weight in weights])


def _castable(module: TensorParallelModule) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters to copy: all but those with gradients that every backward pass sums over tensor-parallel ranks in fp32."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if module.tp.size == 1 or module.defer_tp_grad_sum or module.placements[name].dim is not None:
            yield name, weight
