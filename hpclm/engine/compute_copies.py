"""The weights of linear layers and norms in the compute type, cast once a step from the fp32 weights of the optimizer.

A forward pass then casts no weights. Each gradient arrives in the compute type, is added to the fp32 gradient in place, and is
freed: there is no fp32 copy of the gradient of a micro-batch. The sums are those of casting in every forward pass, bit for bit.

On GPUs the backward pass adds the gradients of matrices and tables to the fp32 ones itself (hpclm.parallel.main_gradients). They
are then never rounded to the compute type. Compiled, it adds those of biases and norms too, in the kernels that make them. Those of
experts are added afterwards: grouped_mm, up to PyTorch 2.13, neither adds to its result nor multiplies bf16 matrices into an fp32 one.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from hpclm.config import EngineConfig, ModelConfig
from hpclm.config.model import BLOCKS
from hpclm.model.experts import Experts
from hpclm.model.init import TensorParallelModule
from hpclm.model.layers import ColumnLinear, Norm, RowLinear, VocabParallelEmbedding
from hpclm.model.stack import Stack


class ComputeCopies:
    """The copies in the model, and the fp32 weights that they are made from."""

    def __init__(self, model: Stack, in_place: bool = False):
        """``in_place``: the backward pass adds gradients to the fp32 ones, where it can."""
        self._added: dict[nn.Parameter, tuple[TensorParallelModule, str]] = {}
        """Each copy whose gradient the backward pass adds in place: its module, and its name there."""
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        """The fp32 weight of each parameter of the model that is a copy."""
        self.tables: list[VocabParallelEmbedding] = []
        """Modules that compute with the fp32 weight, too, and so have the copy beside it."""
        if model.dtype == torch.float32:
            return
        collect = WeakMethod(self._collect)  # the garbage collector does not see what the hooks of a parameter hold
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding) and not in_place:
                module.rows = module.weight.detach().to(model.dtype)
                self.tables.append(module)
            elif isinstance(module, ColumnLinear | RowLinear | Norm | VocabParallelEmbedding | Experts):
                for name, weight in _castable(module):
                    copy = nn.Parameter(weight.detach().to(model.dtype))
                    setattr(module, name, copy)
                    self.masters[copy] = weight
                    matrix = weight.ndim == 2 and name == "weight"
                    # uncompiled, an autograd function for each small weight would cost more than adding its gradient
                    small = weight.ndim == 1 and model.compilation.works
                    if in_place and (matrix or small):
                        self._added[copy] = module, name
                    else:
                        copy.register_post_accumulate_grad_hook(partial(_call, collect))

    def attach(self) -> None:
        """Tell the modules where the fp32 gradients are, which the engine has placed or which are allocated now."""
        for copy, (module, name) in self._added.items():
            master = self.masters[copy]
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            # .data counts its changes apart from other views of a bucket
            module.main_grads[name] = master.grad.data

    def master(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates for a parameter of the model."""
        return self.masters.get(parameter, parameter)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the fp32 weights again, after they have changed."""
        _cast([*self.masters.items(), *self._rows()])

    @torch.no_grad()
    def refresh_tables(self) -> None:
        """Cast only the tables, whose fp32 weights the model computes with too."""
        _cast(list(self._rows()))

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
    """Whether backward passes add gradients to the fp32 ones: on GPUs, in blocks of our own. On CPUs, which multiply no two
    bf16 matrices into an fp32 one, gradients stay what they were.

    Offloading would move the fp32 gradients with the activations, since the forward pass saves both.
    """
    return (
        device.type == "cuda"
        and model.block in BLOCKS
        and not (torch.is_anomaly_enabled() or engine.offload_activations)
    )


def _call(method: WeakMethod[Any], copy: Tensor) -> None:
    """The hook of a copy."""
    collect = method()
    if collect is not None:
        collect(copy)


def _cast(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        copies, weights = zip(*pairs, strict=True)
        # one call for all: a kernel for each weight would leave the GPU idle between small ones
        torch._foreach_copy_([copy.detach() for copy in copies], [weight.detach() for weight in weights])


def _castable(module: TensorParallelModule) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters to copy: all but those whose gradients tensor-parallel ranks sum in every backward pass, in fp32."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if module.tp.size == 1 or module.defer_tp_grad_sum or module.placements[name].dim is not None:
            yield name, weight
