"""Conversion rules between our weights and the tensors of another format.

C hidden size, G key/value heads, D size of one head, V vocabulary.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config import EngineConfig, ModelConfig
from hpclm.model import gpt
from hpclm.model.stack import Stack
from hpclm.parallel.placement import Placement

LOGICAL = re.compile(r"(?:block(\d+)\.)?(.+)\.(\w+)")
EMBEDDINGS = ("tokens", "output")
LINEAR = ("attention.out", "mlp.up", "mlp.down")


@dataclass(frozen=True)
class ConversionRule:
    """One of our weights, the corresponding tensors ``theirs``, and the conversion in both directions."""

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Tensor]


def same(ours: str, theirs: str) -> ConversionRule:
    """Rule for one tensor under another name."""
    return ConversionRule(ours, (theirs,), lambda x: [x], lambda tensors: tensors[0])


def transformed(
    rule: ConversionRule, there: Callable[[Tensor], Tensor], here: Callable[[Tensor], Tensor]
) -> ConversionRule:
    """``rule`` for tensors that are stored in another form. ``there``: from our form to theirs; ``here``: back."""
    return replace(
        rule,
        split=lambda x: [there(part) for part in rule.split(x)],
        join=lambda tensors: rule.join([here(tensor) for tensor in tensors]),
    )


def transposed(rule: ConversionRule) -> ConversionRule:
    """``rule`` for the weight of a linear layer that is stored as [in, out], or all experts' as [E, in, out]; biases stay as they are."""

    def swapped(x: Tensor) -> Tensor:
        return x.transpose(-2, -1) if x.ndim > 1 else x

    return transformed(rule, swapped, swapped)


def table(ours: str, theirs: str, config: ModelConfig) -> ConversionRule:
    """Rule for an embedding with V rows there, padded to a multiple of model.vocab_multiple here."""

    def padded(tensors: Sequence[Tensor]) -> Tensor:
        [rows] = tensors
        if len(rows) != config.vocab_size:
            raise ConfigError(f"{theirs} has {len(rows)} rows, but model.vocab_size is {config.vocab_size}")
        return torch.cat([rows, rows.new_zeros(config.padded_vocab - len(rows), *rows.shape[1:])])

    return ConversionRule(ours, (theirs,), lambda x: [x[: config.vocab_size]], padded)


def stacked(ours: str, theirs: Sequence[str]) -> ConversionRule:
    """Rule for equal blocks of rows stored as separate tensors: gate and up projection of a gated MLP."""
    return ConversionRule(ours, tuple(theirs), lambda x: x.chunk(len(theirs)), lambda tensors: torch.cat(list(tensors)))


def per_expert(ours: str, theirs: Sequence[str], experts: int) -> ConversionRule:
    """Rule for a weight [E, rows, ...] or bias [E, rows] of all experts, stored as several tensors for each expert, such as gate and
    up projection. ``theirs``: the names of these tensors, the first expert's first. The tensors of an expert have equally many rows."""

    def join(tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0].shape
        whole = torch.empty((len(theirs), *first))
        for name, place, part in zip(theirs, whole, tensors, strict=True):
            if part.shape != first:
                raise ConfigError(f"{name} has shape {tuple(part.shape)}, but {theirs[0]} has {tuple(first)}")
            place.copy_(part)
        return whole.unflatten(0, (experts, -1)).flatten(1, 2)

    return ConversionRule(ours, tuple(theirs), lambda x: x.flatten(0, 1).chunk(len(theirs)), join)


def in_one(ours: str, theirs: str, config: ModelConfig) -> ConversionRule:
    """Rule for the fused projection, stored as one tensor with all queries, all keys, all values."""
    sizes = [
        heads * config.head_width
        for heads in (config.attention.heads, config.attention.groups, config.attention.groups)
    ]
    return ConversionRule(
        ours,
        (theirs,),
        lambda x: [torch.cat(unfused(x, config.attention.groups, config.head_width))],
        lambda tensors: fused(tensors[0].split(sizes), config.attention.groups),
    )


def shifted(rule: ConversionRule) -> ConversionRule:
    """``rule`` for a weight that is stored minus 1."""
    return transformed(rule, lambda x: x - 1, lambda x: x + 1)


def reordered(rule: ConversionRule, order: Tensor) -> ConversionRule:
    """``rule`` for separate q, k and v. The heads of q and k have another order of features there: theirs[``order``] equals ours."""
    back = order.argsort()

    def split(x: Tensor) -> list[Tensor]:
        q, k, v = rule.split(x)
        return [_permuted(q, back), _permuted(k, back), v]

    def join(qkv: Sequence[Tensor]) -> Tensor:
        q, k, v = qkv
        return rule.join([_permuted(q, order), _permuted(k, order), v])

    return replace(rule, split=split, join=join)


def rows_reordered(rule: ConversionRule, order: Tensor) -> ConversionRule:
    """``rule`` for one tensor with another order of rows there: in each group of len(``order``) rows, theirs[``order``] equal ours."""
    back = order.argsort()
    return transformed(rule, lambda x: _permuted(x, back), lambda x: _permuted(x, order))


def neighbours(config: ModelConfig) -> Tensor:
    """For each feature of our heads, its index where heads rotate pairs of neighbours; hpclm rotates pairs from the two halves."""
    return torch.cat([pairs(config.rotated), torch.arange(config.rotated, config.head_width)])


def pairs(count: int) -> Tensor:
    """For each of our ``count`` rotated features, its index where pairs of neighbours are rotated."""
    return torch.arange(count).view(-1, 2).t().flatten()


def _permuted(x: Tensor, order: Tensor) -> Tensor:
    return x.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def changed(
    rules: Iterable[ConversionRule], part: str, change: Callable[[ConversionRule], ConversionRule]
) -> Iterator[ConversionRule]:
    """``rules``, with ``change`` applied to those for our weights with ``part`` in their name."""
    for rule in rules:
        if part in rule.ours:
            rule = change(rule)
        yield rule


def absent(ours: str, shape: Sequence[int], value: float) -> ConversionRule:
    """Rule for a weight that is ``value`` everywhere and missing in the other format."""

    def split(x: Tensor) -> list[Tensor]:
        if not x.eq(value).all():
            raise ConfigError(f"{ours} is not {value:g} everywhere, and the other format has no such weight")
        return []

    return ConversionRule(ours, (), split, lambda _: torch.full(tuple(shape), value))


def separate(ours: str, theirs: Sequence[str], config: ModelConfig) -> ConversionRule:
    """Rule for the fused projection [G x (queries, key, value) x D, ...], stored as separate tensors for q, k and v."""
    return ConversionRule(
        ours,
        tuple(theirs),
        lambda x: unfused(x, config.attention.groups, config.head_width),
        lambda qkv: fused(qkv, config.attention.groups),
    )


def fused(qkv: Sequence[Tensor], groups: int) -> Tensor:
    """Separate projections [heads x D, ...] -> the fused projection, grouped by key/value head."""
    return torch.cat([x.unflatten(0, (groups, -1)) for x in qkv], 1).flatten(0, 1)


def unfused(x: Tensor, groups: int, width: int) -> list[Tensor]:
    """The inverse of ``fused``; ``width`` is D."""
    by_group = x.unflatten(0, (groups, -1))
    queries = by_group.shape[1] - 2 * width
    return [part.flatten(0, 1) for part in by_group.split([queries, width, width], 1)]


def of_modules(
    config: ModelConfig, modules: Mapping[str, Sequence[str]], layer: str, in_out: bool = False
) -> Iterator[ConversionRule]:
    """A rule for every weight of a network.

    ``modules``: maps our modules to theirs, which may be separate for q, k, v or for gate and up projection. ``layer``: prefix of module
    names in a block, formatted with its number. ``in_out``: linear layers are stored as [in, out].
    """
    for ours in placements(config):
        match = LOGICAL.fullmatch(ours)
        assert match is not None, ours
        block, module, kind = match.groups()
        names = modules.get(module, module)
        if isinstance(names, str):
            names = [names]
        prefix = "" if block is None else layer.format(block)
        suffix = "weight" if kind == "table" else kind
        theirs = [f"{prefix}{name}.{suffix}" for name in names]
        if module in EMBEDDINGS:
            yield table(ours, theirs[0], config)
        elif len(theirs) > 1 and module == "attention.qkv":
            yield separate(ours, theirs, config)
        elif len(theirs) > 1:
            yield stacked(ours, theirs)
        elif in_out and module == "attention.qkv":
            yield transposed(in_one(ours, theirs[0], config))
        elif in_out and module in LINEAR:
            yield transposed(same(ours, theirs[0]))
        else:
            yield same(ours, theirs[0])


def placements(config: ModelConfig) -> dict[str, Placement]:
    """Shape and placement of every weight of a model, by logical name; allocates nothing."""
    with torch.device("meta"):
        layers = gpt.layers(config, EngineConfig(), torch.float32, 0)
        return Stack(config, layers, torch.float32, wrap=lambda _, layer: layer).placements


def check_depth(config: ModelConfig, tensors: int, place: str) -> None:
    """ConfigError if ``place`` has fewer tensors than the network has layers. Checked before anything is created for each layer."""
    if config.layers > tensors:
        raise ConfigError(f"{place} has {tensors} tensors, too few for the {config.layers} layers of its settings")


def check_names(needed: Iterable[str], there: Iterable[str], place: str) -> None:
    """ConfigError that names tensors missing in ``place``, and unexpected ones."""
    expected = set(needed)
    present = set(there)
    missing = expected - present
    unused = present - expected
    wrong = [*_named("has no", missing, place), *_named("has tensors that this network does not use:", unused, place)]
    if wrong:
        raise ConfigError(wrong)


def without(values: Mapping[str, Any], ignored: Collection[str], needed: Collection[str], kind: str) -> dict[str, Any]:
    """``values`` without the ``ignored`` names; ConfigError for names that do not exist or that hpclm needs."""
    wrong = [f"--ignore {name}: the source has no such {kind}" for name in ignored if name not in values]
    wrong += [f"--ignore {name}: hpclm needs this {kind}" for name in ignored if name in needed]
    if wrong:
        raise ConfigError(wrong)
    return {name: value for name, value in values.items() if name not in ignored}


def _named(what: str, names: set[str], place: str) -> Iterator[str]:
    if names:
        yield f"{place} {what} {first_few(sorted(names))}"


def first_few(names: Sequence[str], shown: int = 5) -> str:
    """The first names and the number of further ones, such as "a, b and 3 more"."""
    text = ", ".join(names[:shown])
    if len(names) > shown:
        text += f" and {len(names) - shown} more"
    return text
