"""What the sides of differential.py computed: put together from their ranks, by hpclm's names, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import differential_cases as cases
import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.interop.huggingface import families
from hpclm.interop.megatron.imported import merged
from hpclm.interop.rules import placements

LOSS, GRADIENT, NORM, LATER = 1e-6, 1e-5, 1e-6, 1e-4
"""Relative tolerances: of losses; of gradients and moments, in norm; of the global norm; of losses and norms of later steps."""
FLOOR = 1e-3
"""Gradients smaller than this share of the global norm are compared relative to that share: they are sums that cancel."""
UPDATE = 1e-5
"""Tolerance of an update relative to the learning rate, beyond what the gradients' difference and rounding the weight amount to."""
LATER_UPDATE = 1e-2
"""The same after several steps, for values whose gradients are not among the smallest: Adam makes large steps of small differences."""
ULP = 2.0**-23
Tensors = dict[str, Tensor]
Found = dict[str, Any]


class Whole:
    """Whole tensors put together from what ranks hold."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.torn: list[str] = []
        """Names of those that ranks hold different bits of."""

    def add(self, name: str, block: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Add a block of one of them."""
        whole = self.tensors.setdefault(name, torch.full(shape, torch.nan))
        place = whole[tuple(slice(at, at + size) for at, size in zip(start, block.shape, strict=True))]
        if not (place.isnan() | (place == block)).all():
            self.torn.append(name)
        place.copy_(block)


def found_by(losses: list[float], norms: list[float], gradients: list[Whole], state: Whole) -> Found:
    """A side's results."""
    torn = [name for whole in (*gradients, state) for name in whole.torn]
    return dict(losses=losses, norms=norms, gradients=[w.tensors for w in gradients], state=state.tensors, torn=torn)


def of_hpclm(ranks: list[dict[str, Any]], model: ModelConfig, request: dict[str, Any]) -> Found:
    """What hpclm's ranks computed."""
    gradients, state = [Whole() for _ in range(request["steps"])], Whole()
    for rank in ranks:
        for whole, held in zip([*gradients, state], [*rank["gradients"], rank["state"]], strict=True):
            for name, start, shape, block in held:
                whole.add(name, block, start, shape)
        if (rank["losses"], rank["norms"]) != (ranks[0]["losses"], ranks[0]["norms"]):
            state.torn.append("loss or norm")
    return found_by(ranks[0]["losses"], ranks[0]["norms"], gradients, state)


def of_megatron(ranks: list[dict[str, Any]], model: ModelConfig, request: dict[str, Any]) -> Found:
    """What Megatron-core's ranks computed, by hpclm's names, and put together as hpclm imports its checkpoints."""
    placed, names = placements(model), cases.megatron_names(model)
    names |= {"output_layer.weight": "tokens.weight"} if model.tied else {}
    by_place = {tuple(rank["place"]): rank for rank in ranks}

    def whole(kind: Callable[[dict[str, Any]], Tensors], prefix: str = "") -> Whole:
        whole = Whole()
        for _, stage, replica in sorted(place for place in by_place if place[0] == 0):
            parts = [kind(by_place[slot, stage, replica]) for slot in range(request["tensor"])]
            for theirs in parts[0]:
                if not theirs.startswith(prefix):
                    continue
                name, shards = names[theirs.removeprefix(prefix)], [part[theirs] for part in parts]
                if placed[name].dim is None and any(not torch.equal(shards[0], shard) for shard in shards):
                    whole.torn.append(name)
                joined = merged(shards, placed[name])
                whole.add(prefix + name, joined, (0,) * joined.ndim, tuple(joined.shape))
        return whole

    gradients = [whole(lambda rank, step=step: rank["gradients"][step]) for step in range(request["steps"])]  # type: ignore[misc]
    state = Whole()
    for prefix in ("model.", "optim.exp_avg.", "optim.exp_avg_sq."):
        part = whole(lambda rank: rank["state"], prefix)
        state.tensors |= part.tensors
        state.torn += part.torn
    last = [by_place[0, request["pipeline"] - 1, replica] for replica in range(request["data"])]
    pairs = [[pair for rank in last for pair in rank["losses"][step]] for step in range(request["steps"])]
    return found_by(
        [mean(step_pairs, request["loss_norm"]) for step_pairs in pairs], ranks[0]["norms"], gradients, state
    )


def mean(pairs: list[tuple[float, int]], loss_norm: str) -> float:
    """The loss of a step from sums and counts of its micro-batches."""
    if loss_norm == "token":
        return sum(total for total, _ in pairs) / max(1, sum(count for _, count in pairs))
    return sum(total / max(1, count) for total, count in pairs) / len(pairs)


def of_transformers(ranks: list[dict[str, Any]], model: ModelConfig, request: dict[str, Any]) -> Found:
    """What transformers computed, by hpclm's names, and converted as hpclm imports its weights."""
    [rank] = ranks
    rules = list(families.of_network(model).rules(model))

    def renamed(held: Tensors, prefix: str = "") -> Tensors:
        there = [rule for rule in rules if all(prefix + name in held for name in rule.theirs)]
        return {prefix + rule.ours: rule.join([held[prefix + name] for name in rule.theirs]) for rule in there}

    state: Tensors = {}
    for prefix in ("model.", "optim.exp_avg.", "optim.exp_avg_sq."):
        state |= renamed(rank["state"], prefix)
    return rank | dict(gradients=[renamed(held) for held in rank["gradients"]], state=state, torn=[])


SIDES: dict[str, Callable[[list[dict[str, Any]], ModelConfig, dict[str, Any]], Found]] = {
    "hpclm": of_hpclm,
    "megatron": of_megatron,
    "transformers": of_transformers,
}


def compared(
    request: dict[str, Any], model: ModelConfig, weights: Tensors, a: Found, b: Found
) -> Iterator[tuple[str, float]]:
    """Names of what is compared, and by how much it differs, as a share of what is tolerated."""
    for name in [*a["torn"], *b["torn"]]:
        yield f"ranks' copies of {name}", torch.inf
    rows = {name: model.vocab_size if name in ("tokens.weight", "output.weight") else None for name in weights}
    for step in range(request["steps"]):
        when = "later " if step else ""
        yield f"{when}loss", relative(a["losses"][step], b["losses"][step]) / (LATER if step else LOSS)
        if b["norms"][step] is not None:
            yield f"{when}norm", relative(a["norms"][step], b["norms"][step]) / (LATER if step else NORM)
    ours, theirs = a["gradients"][0], b["gradients"][0]
    norm = torch.stack([theirs[name][: rows[name]].norm() for name in theirs]).norm()
    yield "norm of the gradients", relative(a["norms"][0], norm.item()) / (2 * NORM)
    for name in weights:
        yield (
            f"gradient of {name}",
            apart(ours[name][: rows[name]], theirs[name][: rows[name]], FLOOR * norm) / GRADIENT,
        )
    clip, optim = request["optim"]["clip"], request["optim"]
    scale = min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0
    for moment, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
        for name in weights if request["steps"] == 1 else ():
            x, y = (side["state"].get(f"optim.{moment}.{name}") for side in (a, b))
            if x is not None and y is not None:
                beta = optim["betas"][power - 1]
                floor = (1 - beta) * (FLOOR * norm * scale) ** power
                yield f"{moment} of {name}", apart(x[: rows[name]], y[: rows[name]], floor) / (3 * power * GRADIENT)
    for name, start in weights.items():
        x, y = (side["state"][f"model.{name}"][: rows[name]] for side in (a, b))
        start = start[: rows[name]]
        pairs = [
            (a["gradients"][step][name][: rows[name]], b["gradients"][step][name][: rows[name]])
            for step in range(request["steps"])
        ]
        rounding = 4 * ULP * request["steps"] * torch.maximum(start.abs(), y.abs())
        if request["steps"] == 1:
            [(g, h)] = pairs
            steep = 2 * (g - h).abs() * scale / (g.abs() * scale + h.abs() * scale + 2 * optim["eps"])
            yield f"update of {name}", ((x - y).abs() / (optim["lr"] * (UPDATE + steep) + rounding)).max().item()
            continue
        certain = torch.stack(
            [h.abs() > 1e-3 * h.square().mean().sqrt() + FLOOR * GRADIENT * norm for _, h in pairs]
        ).all(0)
        allowed = optim["lr"] * LATER_UPDATE * request["steps"] + rounding
        yield f"later update of {name}", ((x - y).abs() * certain / allowed).max().item()


def relative(x: float, y: float) -> float:
    """The difference of two numbers, relative to the second."""
    return abs(x - y) / max(abs(y), 1e-30)


def apart(x: Tensor, y: Tensor, floor: Tensor | float) -> float:
    """The norm of a difference, relative to that of the second tensor, or to ``floor`` if that is larger."""
    return float((x - y).norm() / max(float(y.norm()), float(floor), 1e-30))
