"""Layers that one process builds and runs one after the other: the whole model, or a pipeline's stage.

T tokens in a sequence, t = T / tp of them on this process between layers, B sequences in a micro-batch, C hidden width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpclm.config import ModelConfig
from hpclm.errors import ConfigError
from hpclm.model import draw
from hpclm.model.draw import Initial
from hpclm.model.gpt import Head, LayerSpec
from hpclm.model.loss import TokenLoss
from hpclm.model.offload import on_the_cpu
from hpclm.model.position import Kind, Layout, layout
from hpclm.model.seeds import mix
from hpclm.parallel.form import Form
from hpclm.parallel.mesh import ALONE, Axis

Place = Callable[[str, nn.Module], nn.Module]


class Stack(nn.Module):
    """Layers in one process."""

    def __init__(
        self,
        config: ModelConfig,
        specs: Sequence[LayerSpec],
        dtype: torch.dtype,
        tp: Axis = ALONE,
        loss: TokenLoss | None = None,
        recompute_every: int = 1,
        place: Place | None = None,
        offload: bool = False,
    ):
        """``dtype``: of the activations. ``place`` is given every layer, by name, as soon as it is built, most of them as
        shapes only: to put it on a device, or only a part of it; what it gives takes the layer's place. Without it the
        layers are on the CPU. ``offload``: what the backward pass needs of the blocks is kept on the CPU."""
        super().__init__()
        self.config, self.specs, self.dtype, self.tp = config, tuple(specs), dtype, tp
        self.loss, self.recompute_every, self.offload = loss or TokenLoss(), recompute_every, offload
        self.forms: dict[str, Form] = {}
        """How each weight lies on the tensor axis, by logical name."""
        self.initial: dict[str, Initial] = {}
        """The first values of the weights that were built as shapes only, by logical name."""
        self.layers = nn.ModuleDict()
        place = place or draw.on(torch.device("cpu"), tp)
        for spec in specs:
            if spec.name not in self.layers:
                layer = spec.build()
                self.forms |= {f"{spec.name}.{name}": form for name, form in forms(layer)}
                self.initial |= {f"{spec.name}.{name}": initial for name, initial in draw.shapes(layer)}
                self.layers[spec.name] = place(spec.name, layer)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        seed: int | None = None,
    ) -> Any:
        """[B, T] ids, or a stage's [t, B, C] activations -> activations, or at the end the head or a loss.

        ``positions`` and ``documents`` [B, T] as in layout(). With ``labels`` and ``weights`` [B, T] the last layer gives the
        weighted sum of losses, a scalar in fp32. ``seed``: of what is random in this micro-batch, in training.
        """
        length = x.shape[0] * self.tp.size if x.is_floating_point() else x.shape[1]
        where = layout(self.config, Kind(length, self.dtype, x.device), self.tp, positions, documents, seed)
        for together in groups(self.specs, self.recompute_every):
            with on_the_cpu() if self.offload and together[0].name.startswith("block") else nullcontext():
                if together[0].recompute and self.training and torch.is_grad_enabled():
                    again = seed is None  # otherwise every layer seeds itself, the second time too
                    x = checkpoint(self._run, together, x, where, use_reentrant=False, preserve_rng_state=again)
                else:
                    x = self._run(together, x, where)
        if isinstance(x, Head) and labels is not None and weights is not None:
            return self.loss(x, labels, weights)
        return x

    def compile_blocks(self) -> None:
        """Have torch.compile make each block faster when it first runs."""
        for name, layer in self.layers.items():
            if name.startswith("block"):
                layer.compile(dynamic=False)

    def weights(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter under its logical name, such as block0.attention.qkv.weight; a shared one once."""
        return [(name.removeprefix("layers."), p) for name, p in self.named_parameters()]

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over all weights by logical name; ConfigError names what is missing, left over or of another shape."""
        mine = dict(self.weights())
        check_shapes(self.forms, {name: tuple(t.shape) for name, t in tensors.items()})
        for name, parameter in mine.items():
            parameter.copy_(tensors[name])

    def _run(self, specs: list[LayerSpec], x: Any, where: Layout) -> Any:
        for spec in specs:
            if where.seed is not None and self.training:
                torch.manual_seed(mix(where.seed, spec.number, self.tp.rank))
            module = self.layers[spec.name]
            x = module(x, where) if spec.call is None else spec.call(module, x, where)
        return x


class Stages(nn.ModuleList):
    """The stages of a pipeline that one process has; the whole says what its stages say."""

    def __init__(self, stacks: Sequence[Stack]):
        super().__init__(stacks)
        self.stacks = tuple(stacks)
        self.dtype = stacks[0].dtype
        self.forms = {name: form for stack in stacks for name, form in stack.forms.items()}

    def weights(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter under its logical name."""
        return [pair for stack in self.stacks for pair in stack.weights()]


def forms(layer: nn.Module) -> Iterator[tuple[str, Form]]:
    """Name and form of every weight of a layer as it was built; what no module says it splits, every process has whole."""
    for name, parameter in layer.named_parameters():
        owner, _, last = name.rpartition(".")
        split: dict[str, Form] = getattr(layer.get_submodule(owner), "forms", {})
        yield name, split.get(last, Form(tuple(parameter.shape)))


def check_shapes(mine: Mapping[str, Form], given: Mapping[str, tuple[int, ...]]) -> None:
    """ConfigError that names the weights which are missing, left over or of another shape."""
    shapes = {name: form.shape for name, form in mine.items()}
    wrong = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
    if wrong:
        raise ConfigError(
            [f"weight {name} is {given.get(name)} there and {shapes.get(name)} here" for name in wrong[:10]]
        )


def groups(specs: Sequence[LayerSpec], recompute_every: int) -> list[list[LayerSpec]]:
    """Neighbouring layers that are forgotten together, ``recompute_every`` at most; any other layer alone."""
    found: list[list[LayerSpec]] = []
    for spec in specs:
        full = bool(found) and (len(found[-1]) == recompute_every or not found[-1][0].recompute)
        if found and spec.recompute and not full:
            found[-1].append(spec)
        else:
            found.append([spec])
    return found
