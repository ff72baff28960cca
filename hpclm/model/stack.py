"""The layers that one process runs in sequence: the whole model, or a pipeline stage.

T tokens in a sequence, t = T / tp of them on this process between layers, B sequences in a micro-batch, C hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.layer import Layer
from hpclm.config.model import BLOCKS
from hpclm.model import init
from hpclm.model.attention.layout import Layouts
from hpclm.model.cache import KeyValueCache
from hpclm.model.compiled import StackCompilation, compiled
from hpclm.model.context import LayerContext, Reports
from hpclm.model.dropout import LayerSeeds
from hpclm.model.expert_mlp import ExpertMLP
from hpclm.model.head import Head
from hpclm.model.init import InitSpec
from hpclm.model.loss import TokenLoss
from hpclm.model.spec import LayerSpec
from hpclm.parallel.mesh import SINGLE_MESH, Axis, Mesh
from hpclm.parallel.micro_batch import MicroBatch, ModelOutput, add
from hpclm.parallel.placement import Placement

WrapLayer = Callable[[LayerSpec, nn.Module], nn.Module]
"""Called with each layer's spec and module right after it is built: places, shards or wraps the layer, and returns its replacement."""


class Execution(NamedTuple):
    """How a stack runs its layers."""

    loss: TokenLoss | None = None
    recompute_every: int = 1
    """Number of layers that are recomputed together."""
    offload: bool = False
    """Whether activations of the blocks stay on the CPU until the backward pass."""


class Stack(nn.Module):
    """A sequence of layers."""

    def __init__(
        self,
        config: ModelConfig,
        specs: Sequence[LayerSpec],
        dtype: torch.dtype,
        mesh: Mesh = SINGLE_MESH,
        wrap: WrapLayer | None = None,
        execution: Execution | None = None,
    ):
        """``dtype``: type of the activations. ``wrap``: by default, places layers on the CPU."""
        super().__init__()
        tp = mesh.tp
        cp = mesh.cp
        execution = execution or Execution()
        self.config = config
        self.specs = tuple(specs)
        self.dtype = dtype
        self.tp = tp
        self.cp = cp
        self.loss = execution.loss or TokenLoss()
        self.recompute_every = execution.recompute_every
        self.offload = execution.offload
        self.compilation = StackCompilation()
        blocks = [spec.layer for spec in specs if spec.layer] or config.blocks[:1]
        self.first = blocks[0]
        """The block whose positions other layers see too."""
        self.layouts = Layouts(config, dtype, blocks, (tp, cp), self.compilation)
        self.seeds = LayerSeeds(config, specs[-1].number + 1, tp, cp, self.compilation)
        self.placements: dict[str, Placement] = {}
        """How each weight is split over the tensor-parallel axis, by logical name."""
        self.init_specs: dict[str, InitSpec] = {}
        """How to initialise the weights built on the meta device, by logical name."""
        self.layers = nn.ModuleDict()
        wrap = wrap or init.materialize_on(torch.device("cpu"), tp)
        for spec in specs:
            if spec.name not in self.layers:
                layer = spec.build()
                for name, weight in layer.named_parameters():
                    if config.freezes(f"{spec.name}.{name}"):
                        weight.requires_grad_(False)
                self.placements |= {f"{spec.name}.{name}": placement for name, placement in placements(layer)}
                self.placements |= {
                    f"{spec.name}.{name}": Placement(tuple(buffer.shape)) for name, buffer in init.saved_buffers(layer)
                }
                self.init_specs |= {f"{spec.name}.{name}": initial for name, initial in init.uninitialized(layer)}
                # placed and sharded one by one: a model too large for one process is never built whole
                self.layers[spec.name] = wrap(spec, layer)

    def forward(self, batch: MicroBatch, x: Tensor | None = None, cache: KeyValueCache | None = None) -> ModelOutput:
        """Run the micro-batch. ``x`` [t, B, C]: output of the previous stage, if any. ``cache``: earlier keys and values in generation."""
        keys = None
        if cache is not None:
            layouts = cache.extend(batch.tokens.shape[1])
        else:
            layouts = self.layouts.of(batch)
            if self.training:
                keys = self.seeds.keys(batch.seed, batch.tokens.device)
        value: Any = batch.tokens if x is None else x
        scalars: dict[str, Tensor] = {}
        for group in groups(self.specs, self.recompute_every):
            with save_on_cpu(pin_memory=True) if self.offload and group[0].layer else nullcontext():
                if group[0].recompute and self.training and torch.is_grad_enabled():
                    # random numbers are seeded, so that recomputation draws the same
                    output = checkpoint(
                        self._run, group, value, layouts, keys, use_reentrant=False, preserve_rng_state=False
                    )
                else:
                    output = self._run(group, value, layouts, keys)
            value = output.value
            # returned by the checkpoint, not stored inside: a recomputation would report them twice
            add(scalars, output.scalars)
        if isinstance(value, Head) and batch.labels is not None and batch.weights is not None:
            value, more = self.loss(value, batch.labels, batch.weights)
            add(scalars, more)
        return ModelOutput(value, scalars)

    def head(self, ids: Tensor, cache: KeyValueCache | None = None) -> Head:
        """[B, T] ids -> the input of the output projection, without a loss. ``cache``: see forward()."""
        head: Head = self(MicroBatch(ids), cache=cache).value
        return head

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """The blocks by name."""
        return {spec.name: self.layers[spec.name] for spec in self.specs if spec.layer}

    def compile_blocks(self, whole: bool = True) -> None:
        """Compile the blocks and the other layers between embedding and loss; if ``whole``, each as one graph."""
        names = [spec.name for spec in self.specs if spec.layer or spec.name in ("entry", "norm")]
        foreign = self.config.block not in BLOCKS or self.config.kernels != "torch"  # they may break graphs
        for module in self.modules():
            if isinstance(module, ExpertMLP) and module.runs_uncompiled(self.dtype):
                # sizes that the host learns would be constants of a graph, so every other routing would recompile it
                module.compute = torch.compiler.disable(module.compute)  # type: ignore[method-assign]
                foreign = True
        for name in names:  # equal layers share graphs
            self.layers[name].forward = compiled(self.layers[name].forward, whole and not foreign)
        self.compilation.layers = True

    def weights(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter under its logical name, such as block0.attention.qkv.weight; tied weights once."""
        return [(name.removeprefix("layers."), p) for name, p in self.named_parameters()]

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load all weights by logical name; ConfigError names weights that are missing, unexpected or of another shape."""
        mine = dict(self.weights())
        split = next((name for name, placement in self.placements.items() if placement.data_ranks > 1), None)
        if split:
            raise ConfigError(
                f"data-parallel ranks split {split}, so a single process has only a part of it: model.block={self.config.block} works "
                "only in training runs and their evaluations"
            )
        check_shapes(self.placements, {name: tuple(t.shape) for name, t in tensors.items()})
        for name, parameter in mine.items():
            parameter.copy_(tensors[name])
        for spec in self.specs:
            for name, buffer in init.saved_buffers(self.layers[spec.name]):
                buffer.copy_(tensors[f"{spec.name}.{name}"])

    def _run(
        self, specs: list[LayerSpec], x: Any, layouts: dict[Layer, LayerContext], keys: list[Tensor] | None
    ) -> ModelOutput:
        """Run ``x`` through consecutive layers. ``layouts``: the context of each kind of block; ``keys``: see LayerSeeds.keys()."""
        scalars: dict[str, Tensor] = {}
        for spec in specs:
            given = layouts[spec.layer or self.first]
            reports = (
                Reports()
            )  # new for each layer, so that it is empty when the layer runs: compiled code depends on its content
            if self.training and given.weights is not None:
                given = given._replace(reports=reports)
            if self.training:
                given = self.seeds.of_layer(given, spec.number, keys)
            # by name: a tied output runs the module of the token embedding
            module = self.layers[spec.name]
            x = module(x, given) if spec.call is None else spec.call(module, x, given)
            for name, report in reports.values.items():
                add(scalars, {f"{name}{spec.name}" if name.endswith("/") else name: report})
        return ModelOutput(x, scalars)


class Stages(nn.ModuleList):
    """The pipeline stages of one process, presented as one module."""

    def __init__(self, stacks: Sequence[Stack]):
        super().__init__(stacks)
        self.stacks = tuple(stacks)
        self.dtype = stacks[0].dtype
        self.placements = {name: placement for stack in stacks for name, placement in stack.placements.items()}

    def weights(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter under its logical name."""
        return [pair for stack in self.stacks for pair in stack.weights()]


def placements(layer: nn.Module) -> Iterator[tuple[str, Placement]]:
    """Name and placement of every weight of a layer; weights without a declared placement are replicated."""
    for name, parameter in layer.named_parameters():
        owner, _, last = name.rpartition(".")
        split: dict[str, Placement] = getattr(layer.get_submodule(owner), "placements", {})
        yield name, split.get(last, Placement(tuple(parameter.shape)))


def check_local_shapes(name: str, layer: nn.Module, tp: Axis) -> None:
    """ConfigError if a weight's local shape contradicts its placement: a checkpoint would lack part of it, or have it twice."""
    for (weight_name, placement), weight in zip(placements(layer), layer.parameters(), strict=True):
        if tuple(weight.shape) != placement.local(tp):
            raise ConfigError(
                f"{name}.{weight_name} has shape {tuple(weight.shape)}, but its placement gives {placement.local(tp)} out of {placement.shape}; "
                "create it in that shape, as new_parameter does, or declare its placement"
            )


def check_shapes(mine: Mapping[str, Placement], given: Mapping[str, tuple[int, ...]]) -> None:
    """ConfigError that names weights that are missing, unexpected or of another shape."""
    shapes = {name: placement.shape for name, placement in mine.items()}
    wrong = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
    if wrong:
        raise ConfigError([_mismatch(name, given.get(name), shapes.get(name)) for name in wrong[:10]])


def _mismatch(name: str, saved: tuple[int, ...] | None, expected: tuple[int, ...] | None) -> str:
    if saved is None:
        return f"the checkpoint has no weight {name} (expected shape {expected})"
    if expected is None:
        return f"the checkpoint has a weight {name} of shape {saved}, which this model does not have"
    return f"weight {name} has shape {saved} in the checkpoint, but this model expects {expected}"


def groups(specs: Sequence[LayerSpec], recompute_every: int) -> list[list[LayerSpec]]:
    """Consecutive layers that are recomputed together, at most ``recompute_every``; every other layer is a group by itself."""
    together: list[list[LayerSpec]] = []
    for spec in specs:
        if spec.recompute and together and together[-1][0].recompute and len(together[-1]) < recompute_every:
            together[-1].append(spec)
        else:
            together.append([spec])
    return together
