"""The layers that one process runs in sequence: the whole model, or a pipeline stage.

T tokens in a sequence, t = T / tp of them on this process between layers, B sequences in a micro-batch, C hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpclm.config import ModelConfig
from hpclm.config.model import BLOCKS
from hpclm.errors import ConfigError
from hpclm.model import init
from hpclm.model.attention_backend import flexible
from hpclm.model.cache import KeyValueCache
from hpclm.model.compiled import Compilation, compile_layers
from hpclm.model.gpt import Head, LayerSpec
from hpclm.model.init import InitSpec
from hpclm.model.layers import DROPOUT_SITES, keys_to_device, mix_seed
from hpclm.model.loss import TokenLoss
from hpclm.model.offload import ActivationOffload, Streams
from hpclm.model.position import (
    POSITIONS,
    ActivationSpec,
    AttentionMetadata,
    Flex,
    Prepared,
    attention_metadata,
    block_mask,
    block_starts,
    rotary_rates,
    rotates,
    seen,
)
from hpclm.model.scores import BLOCK, flex_attention
from hpclm.parallel.mesh import SINGLE, Axis
from hpclm.parallel.micro_batch import MicroBatch, Output, add
from hpclm.parallel.placement import Placement
from hpclm.parallel.sequence import SequencePart, pieces, row_blocks

WrapLayer = Callable[[str, nn.Module], nn.Module]
"""Given each layer, by name, right after it is built: places, shards or wraps it, and returns what takes its place."""


class Stack(nn.Module):
    """A sequence of layers."""

    def __init__(
        self,
        config: ModelConfig,
        specs: Sequence[LayerSpec],
        dtype: torch.dtype,
        tp: Axis = SINGLE,
        loss: TokenLoss | None = None,
        recompute_every: int = 1,
        wrap: WrapLayer | None = None,
        offload: bool = False,
        cp: Axis = SINGLE,
    ):
        """``dtype``: of the activations. ``wrap`` is called with every layer as soon as it is built, most of them on the meta
        device, and returns the layer to use; by default layers are placed on the CPU. ``offload``: activations of the blocks
        are kept on the CPU until the backward pass."""
        super().__init__()
        self.config, self.specs, self.dtype, self.tp, self.cp = config, tuple(specs), dtype, tp, cp
        self.loss, self.recompute_every, self.offload = loss or TokenLoss(), recompute_every, offload
        self._compilation: Compilation | None = None
        self._attention: Compilation | None = None
        self.compiles_attention = False
        """Whether FlexAttention may be compiled on its own, on GPUs, in layers that are not compiled."""
        self.counter_dropout: bool | None = None
        """Whether dropout outside of attention goes by counters; None: in compiled blocks of our own, on GPUs."""
        self._made: dict[Any, Any] = {}
        """What forward passes need and is made once."""
        self.placements: dict[str, Placement] = {}
        """How each weight is split over the tensor-parallel axis, by logical name."""
        self.init_specs: dict[str, InitSpec] = {}
        """How to initialise the weights that were built on the meta device, by logical name."""
        self.layers = nn.ModuleDict()
        wrap = wrap or init.materialize_on(torch.device("cpu"), tp)
        for spec in specs:
            if spec.name not in self.layers:
                layer = spec.build()
                self.placements |= {f"{spec.name}.{name}": placement for name, placement in placements(layer)}
                self.init_specs |= {f"{spec.name}.{name}": initial for name, initial in init.uninitialized(layer)}
                self.layers[spec.name] = wrap(spec.name, layer)

    def forward(self, batch: MicroBatch, x: Tensor | None = None, cache: KeyValueCache | None = None) -> Output:
        """The micro-batch through these layers. ``x`` [t, B, C]: what the stage before this one made of it, if there is one.
        ``cache``: of the tokens before these, when text is generated."""
        length, device = batch.tokens.shape[1] * self.cp.size, batch.tokens.device
        if cache is not None:
            metadata, keys = cache.extend(length), None
        else:
            kind = ActivationSpec(length, self.dtype, device)
            metadata, keys = self._metadata(kind, batch), self._keys(batch.seed, device)
        value: Any = batch.tokens if x is None else x
        scalars: dict[str, Tensor] = {}
        offload = ActivationOffload(self._once(Streams, lambda: Streams(device))) if self.offload else None
        for group in groups(self.specs, self.recompute_every):
            with offload.next_block() if offload and group[0].name.startswith("block") else nullcontext():
                if group[0].recompute and self.training and torch.is_grad_enabled():
                    # what is random is seeded, also when it is recomputed
                    made = checkpoint(
                        self._run, group, value, metadata, keys, use_reentrant=False, preserve_rng_state=False
                    )
                else:
                    made = self._run(group, value, metadata, keys)
            value = made.value
            add(scalars, made.scalars)
        if isinstance(value, Head) and batch.labels is not None and batch.weights is not None:
            value, more = self.loss(value, batch.labels, batch.weights)
            add(scalars, more)
        return Output(value, scalars)

    def head(self, ids: Tensor, cache: KeyValueCache | None = None) -> Head:
        """[B, T] ids -> the input of the output projection, without a loss; ``cache`` as of forward()."""
        head: Head = self(MicroBatch(ids), cache=cache).value
        return head

    def _metadata(self, kind: ActivationSpec, batch: MicroBatch) -> dict[str, AttentionMetadata]:
        """The layout of a micro-batch for each kind of layer."""
        config, device = self.config, kind.device
        documents, weights = batch.documents, batch.weights
        if weights is not None:
            weights = weights.t().chunk(self.tp.size)[self.tp.rank]
        slopes = self._slopes(device)  # a copy from the host in every micro-batch would wait for the device
        part = self._once(("part", kind), lambda: SequencePart.of(self.cp, kind.length, device))
        starts, reads = (
            None,
            device.type == "cpu" and not torch.cuda.is_available(),
        )  # a GPU, even a simulated one, would wait
        if documents is not None and reads and not self.compiled:  # other numbers would be compiled again
            starts = block_starts(documents, [begin for begin, _ in row_blocks(pieces(self.cp, kind.length), BLOCK)])
        masks: dict[int | None, Any] = {}
        made = {}
        alone = self.compiles_attention and (self._attention is None or self._attention.works)
        for layer in dict.fromkeys(spec.kind for spec in self.specs):
            window, flex = seen(config, layer, kind.length), None
            special = (documents, slopes, window) != (None, None, None)
            # uncompiled, scaled_dot_product_attention takes parts of sequences piece by piece
            able = self.compiled or (alone and (special or part is None))
            if flexible(config, able, device, special or part is not None):
                if window not in masks:
                    make = partial(block_mask, kind, documents, window, part)
                    masks[window] = make() if documents is not None else self._once((kind, window), make)
                run = None if self.compiled else self._compiled_attention()
                flex = Flex(masks[window], slopes, None if part is None else part.places, run)
            rates = None
            if rotates(config, layer):  # longrope's are a copy from the host, for which it would wait
                make_rates = partial(rotary_rates, config, layer, kind.length, device)
                rates = self._once(("rates", kind, layer), make_rates)
            prepared = Prepared(slopes, flex, starts, part, rates)
            layout = attention_metadata(config, kind, self.tp, batch, layer, prepared)
            made[layer] = layout._replace(weights=weights)
        return made

    def _compiled_attention(self) -> Callable[..., Tensor]:
        """FlexAttention, compiled on its own until that fails."""
        self._attention = compilation = self._attention or Compilation("attention runs", axes=(self.tp, self.cp))
        made: Callable[..., Tensor] = self._once("flex", lambda: compilation.of(flex_attention, flex_attention))
        return made

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled; not any more once that has failed."""
        return self._compilation is not None and self._compilation.works

    @property
    def compilations(self) -> list[Compilation]:
        """All that is compiled here, or was to be."""
        return [made for made in (self._compilation, self._attention, *self.loss.compilations) if made is not None]

    def compile_blocks(self, whole: bool = True, replicas: Axis = SINGLE) -> None:
        """Compile the blocks and the other layers between embedding and loss, ``whole``: each as one graph. ``replicas``: those that
        reduce gradients in the order in which backward passes make them, and so must run the blocks in one way."""
        names = [name for name in self.layers if name.startswith("block") or name in ("entry", "norm")]
        own = self.config.block not in BLOCKS or self.config.kernels != "torch"  # they may break graphs
        self._compilation = compile_layers(
            [self.layers[name] for name in names], whole and not own, axes=(self.tp, self.cp, replicas)
        )

    def weights(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter under its logical name, such as block0.attention.qkv.weight; tied weights once."""
        return [(name.removeprefix("layers."), p) for name, p in self.named_parameters()]

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load all weights by logical name; ConfigError names any that are missing, unexpected or of another shape."""
        mine = dict(self.weights())
        split = next((name for name, placement in self.placements.items() if placement.data_ranks > 1), None)
        if split:
            raise ConfigError(
                f"data-parallel ranks split {split}, so that one process has a part of it only: model.block={self.config.block} can be "
                "trained and evaluated by training runs, and nothing else"
            )
        check_shapes(self.placements, {name: tuple(t.shape) for name, t in tensors.items()})
        for name, parameter in mine.items():
            parameter.copy_(tensors[name])

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returned the first time."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _slopes(self, device: torch.device) -> Tensor | None:
        """ALiBi's slopes of this process's heads."""
        slopes = POSITIONS[self.config.positions].slopes
        return slopes and self._once(("slopes", device), lambda: slopes(self.config.heads, device, self.tp))

    def _keys(self, seed: int | None, device: torch.device) -> list[Tensor] | None:
        """The keys of each layer, if this micro-batch's dropout goes by counters."""
        if seed is None or not self.config.dropout or not (self.training and self.counts(device)):
            return None
        numbers = range(self.specs[-1].number + 1)
        return list(
            keys_to_device(
                [[mix_seed(seed, n, site) for site in range(DROPOUT_SITES)] for n in numbers], device
            ).unbind()
        )

    def counts(self, device: torch.device) -> bool:
        """Whether dropout outside of attention goes by counters."""
        if self.counter_dropout is not None:
            return self.counter_dropout
        return self.compiled and device.type == "cuda" and self.config.block in BLOCKS

    def _run(
        self, specs: list[LayerSpec], x: Any, metadata: dict[str, AttentionMetadata], keys: list[Tensor] | None
    ) -> Output:
        scalars: dict[str, Tensor] = {}
        for spec in specs:
            given = metadata[spec.kind]
            reports: dict[str, Tensor] = {}  # of this layer, which may be compiled: never filled before it runs
            if self.training and given.weights is not None:
                given = given._replace(reports=reports)
            if given.seed is not None and self.training and (keys is None or self.config.attention_dropout):
                seed_generators(mix_seed(given.seed, spec.number, self.tp.rank + self.tp.size * self.cp.rank), keys)
            given = given if keys is None else given._replace(seed=None, keys=keys[spec.number])
            module = self.layers[spec.name]
            x = module(x, given) if spec.call is None else spec.call(module, x, given)
            add(
                scalars,
                {f"{name}{spec.name}" if name.endswith("/") else name: value for name, value in reports.items()},
            )
        return Output(x, scalars)


def seed_generators(seed: int, keys: list[Tensor] | None) -> None:
    """Seed PyTorch's generators; with ``keys`` only the GPU's own, which the attention kernels use."""
    if keys is None or not keys[0].is_cuda:
        torch.manual_seed(seed)
    else:
        torch.cuda.default_generators[keys[0].get_device()].manual_seed(seed)


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


def check_shapes(mine: Mapping[str, Placement], given: Mapping[str, tuple[int, ...]]) -> None:
    """ConfigError that names the weights that are missing, unexpected or of another shape."""
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
    """Consecutive layers that are recomputed together, at most ``recompute_every``; every other layer is its own group."""
    together: list[list[LayerSpec]] = []
    for spec in specs:
        last = together[-1] if together else []
        if last and last[0].recompute and spec.recompute and len(last) < recompute_every:
            last.append(spec)
        else:
            together.append([spec])
    return together
