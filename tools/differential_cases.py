"""The configurations of differential.py: drawn by seed and number, made simpler, and turned into weights and batches.

A case is a flat dictionary. Names with a dot are hpclm's settings; the others are in ``PLAIN``, with the values that a case without
them has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import yaml
from differential_worker import RefusedError
from torch import Tensor

from hpclm import config
from hpclm.config import ModelConfig, RunConfig
from hpclm.config.checks import value_at
from hpclm.config.fields import as_yaml
from hpclm.interop.huggingface import custom, families
from hpclm.interop.megatron.imported import ours
from hpclm.interop.rules import placements

Case = dict[str, Any]
PLAIN: Case = {
    "draw": 0,  # seed of weights and batches
    "steps": 1,
    "data": 1,  # replicas
    "micro_batches": 1,
    "masked": 0.0,  # share of the tokens that the loss leaves out
    "documents": "none",  # what begins again inside of a sample: attention, positions, or both
    "sequence_parallel": False,  # Megatron-core's; hpclm always has it
    "distributed_optimizer": False,  # Megatron-core's ZeRO 1
    "fused": False,  # Megatron-core's own formulas of bias and activation
    "attention": "sdpa",  # of transformers
}
SIMPLEST: Case = {
    **PLAIN, "parallel.tensor": 1, "parallel.pipeline": 1, "parallel.schedule": "1f1b", "parallel.chunks": 1, "engine.name": "native",
    "engine.zero_stage": 0, "engine.recompute": "none", "engine.loss_chunk": None, "model.layers": 1, "model.attention.heads": 1, "model.hidden": 16, "model.attention.kv_heads": None,
    "model.ffn": 16, "model.context": 8, "model.vocab_size": 16, "model.vocab_multiple": 1, "model.activation": "relu",
    "model.norm": "layernorm", "model.norm_eps": 1e-5, "model.bias": True, "model.attention.qk_norm": False, "model.positions": "none",
    "model.rope.base": 10000.0, "model.tied": True, "model.embed_norm": False, "batch.micro_size": 1, "batch.loss_norm": "token",
    "optim.clip": 0.0, "optim.weight_decay": 0.0, "optim.decayed": "matrices", "optim.eps": 1e-8, "optim.betas": [0.9, 0.95],
    "optim.lr": 1e-3,
}  # fmt: skip
"""What shrinking tries for each setting."""
TOGETHER: list[Case] = [
    {"parallel.pipeline": 1, "engine.name": "native", "parallel.schedule": "1f1b", "parallel.chunks": 1},
    {"data": 1, "engine.name": "native", "engine.zero_stage": 0},
    {"masked": 0.0, "batch.loss_norm": "token"},
    {"model.attention.heads": 1, "model.attention.kv_heads": None},
    {"model.positions": "none", "model.rope.base": 10000.0},
]
"""Settings that shrinking changes at once, since one alone would be refused."""
MODULES = (
    *("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.q_layernorm"),
    *("self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"),
)
"""Megatron-core's, in a layer."""
OUTSIDE = ("embedding.word_embeddings", "embedding.position_embeddings", "decoder.final_layernorm", "output_layer")


def drawn(against: str, seed: int, number: int, processes: int) -> Case:
    """Configuration ``number`` of ``seed``, with at most ``processes`` ranks a side."""
    pick = random.Random(f"{against} {seed} {number}")
    one = pick.choice
    tensor, pipeline, data = one(
        [
            (t, p, d)
            for t in (1, 1, 2)
            for p in (1, 1, 2)
            for d in (1, 1, 2)
            if t * p * d <= processes and (t * p * d > 1 or pick.random() < 0.4)
        ]
    )
    heads, width = (
        one([1, 2, 2, 3, 4, 4, 6] if tensor == 1 else [2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 8, 3]),
        one([4, 8, 8, 16]),
    )
    masked = one([0.0, 0.0, 0.3, 0.9])
    layers = one([1, 2, 2, 3]) if pipeline == 1 else one([2, 2, 2, 2, 3])
    drawn: Case = {
        "draw": number, "steps": one([1, 1, 1, 3]), "data": data, "micro_batches": one([1, 2, 2, 3] if pipeline == 1 else [2, 2, 3, 4]), "masked": masked,
        "documents": one(["none"] * 9 + ["both", "attention", "positions"]), "batch.micro_size": one([1, 2, 3]), "batch.loss_norm": one(["token", "microbatch"]) if masked else "token",
        "parallel.tensor": tensor, "parallel.pipeline": pipeline, "model.layers": layers, "model.attention.heads": heads,
        "model.hidden": max(heads * width, 12), "model.ffn": one([None, 24, 40, 64, 96]), "model.context": one([8, 12, 16, 24, 32]),
        "model.vocab_size": pick.randrange(40, 130), "model.vocab_multiple": one([2, 2, 8, 64]), "model.norm_eps": one([1e-5, 1e-5, 1e-6, 1e-3]),
        "model.tied": pick.random() < 0.5, "engine.recompute": one(["none", "none", "none", "selective", "full"]), "engine.loss_chunk": one([None, None, None, 7, 50]),
        "optim.lr": round(10 ** pick.uniform(-4, -2), 7), "optim.betas": one([[0.9, 0.95], [0.9, 0.999], [0.0, 0.98], [0.8, 0.9]]),
        "optim.eps": one([1e-8, 1e-8, 1e-6, 1e-3]), "optim.weight_decay": one([0.0, 0.01, 0.1, 1.0]), "optim.clip": one([0.0, 1.0, 1.0, 0.05, 100.0]),
    }  # fmt: skip
    drawn |= _engine(pick, pipeline, data)
    return drawn | (_megatron if against == "megatron" else _transformers)(pick, drawn)


def _engine(pick: random.Random, pipeline: int, data: int) -> Case:
    """One of hpclm's engines that can do this."""
    if pipeline > 1:
        more: list[Case] = [
            {},
            {},
            {"parallel.schedule": "gpipe"},
            {"parallel.schedule": "interleaved", "parallel.chunks": 2, "model.layers": 4},
        ]
        more += [{"parallel.schedule": "zero_bubble", "engine.recompute": "none"}]
        return {"engine.name": "pipelining", **pick.choice(more)}
    if data > 1:
        name, stage = pick.choice([("native", 0), ("native", 1), ("native", 1), ("fsdp2", 2), ("fsdp2", 3)])
        return {"engine.name": name, "engine.zero_stage": stage}
    return {"engine.name": "native"}


def _megatron(pick: random.Random, case: Case) -> Case:
    activation = pick.choice(["gelu", "gelu_tanh", "gelu_tanh", "relu", "swiglu", "swiglu", "geglu"])
    bias, positions = pick.random() < 0.5, pick.choice(["learned", "rope", "rope", "none"])
    fused = activation == "swiglu" or (activation == "gelu_tanh" and bias)
    return {
        "model.activation": activation, "model.bias": bias, "model.positions": positions, "model.norm": pick.choice(["layernorm", "rmsnorm"]),
        "model.attention.qk_norm": pick.random() < 0.25, "model.attention.kv_heads": _groups(pick, case),
        **({"model.rope.base": pick.choice([10000.0, 5000.0, 500.0, 1e6])} if positions == "rope" else {}),
        "sequence_parallel": case["parallel.tensor"] > 1 and pick.random() < 0.5, "distributed_optimizer": pick.random() < 0.4,
        "fused": fused and pick.random() < 0.6,
    }  # fmt: skip


def _transformers(pick: random.Random, case: Case) -> Case:
    """Only what one of transformers' classes has."""
    family = pick.choice(["gpt2", "llama", "llama", "qwen3", "bloom", "neox"])
    drawn: Case = {
        "optim.decayed": pick.choice(["matrices", "matrices", "all"]),
        "attention": pick.choice(["sdpa", "eager"]),
    }
    if family in ("llama", "qwen3"):
        drawn |= {"model.norm": "rmsnorm", "model.activation": pick.choice(["swiglu", "swiglu", "geglu"])}
        drawn |= {"model.bias": family == "llama" and pick.random() < 0.4, "model.attention.qk_norm": family == "qwen3"}
        drawn |= {"model.attention.kv_heads": _groups(pick, case)}
    else:
        drawn |= {
            "model.norm": "layernorm",
            "model.activation": pick.choice(["gelu", "gelu_tanh", "relu"]),
            "model.bias": True,
        }
    if family == "bloom":
        drawn |= {
            "attention": "eager",
            "model.embed_norm": True,
            "model.activation": "gelu_tanh",
            "model.ffn": None,
            "documents": "none",
        }
    if family in ("llama", "qwen3", "neox"):
        drawn |= {"model.rope.base": pick.choice([10000.0, 5000.0, 500.0, 1e6])}
    return drawn | {"model.positions": {"gpt2": "learned", "bloom": "alibi"}.get(family, "rope")}


def _groups(pick: random.Random, case: Case) -> int:
    """Key/value heads: mostly a number that hpclm can split."""
    heads, tensor = case["model.attention.heads"], case["parallel.tensor"] if pick.random() < 0.9 else 1
    return pick.choice([count for count in range(1, heads + 1) if not heads % count and not count % tensor] or [heads])


def simpler(case: Case) -> Iterator[Case]:
    """The cases that are a step simpler."""
    changes: list[Case] = [*TOGETHER, *({name: value} for name, value in SIMPLEST.items())]
    changes += [
        {name: 2} for name in ("model.layers", "model.attention.heads", "micro_batches") if case.get(name, 1) > 2
    ]
    for change in changes:
        if any(name in case and case[name] != value for name, value in change.items()):
            less = {**case, **change}
            yield {name: value for name, value in less.items() if name in case}


def shrunk(case: Case, differs: Callable[[Case], bool]) -> Case:
    """The simplest case that still differs."""
    for less in simpler(case):
        if differs(less):
            return shrunk(less, differs)
    return case


def words(case: Case) -> list[str]:
    """The case as words of a command line."""
    return [f"{name}={as_yaml(value)}" for name, value in case.items() if PLAIN.get(name, "") != value]


def parsed(given: list[str]) -> Case:
    """The inverse of ``words``."""
    pairs = (word.partition("=") for word in given)
    return {**PLAIN, **{name: yaml.safe_load(value) for name, _, value in pairs}}


def processes(case: Case) -> int:
    """Ranks of each side; transformers has one."""
    size: int = case["data"] * case.get("parallel.tensor", 1) * case.get("parallel.pipeline", 1)
    return size


def loaded(case: Case) -> tuple[RunConfig, list[str]]:
    """hpclm's settings, and as words; ConfigError if it refuses them."""
    size = processes(case)
    chosen = {name: value for name, value in case.items() if "." in name}
    if chosen.get("parallel.pipeline", 1) == 1:
        chosen = {name: value for name, value in chosen.items() if name not in ("parallel.schedule", "parallel.chunks")}
    chosen["batch.global_size"] = case["micro_batches"] * case.get("batch.micro_size", 4) * case["data"]
    chosen |= {
        "engine.device": "cpu",
        "engine.precision": "fp32",
        "data.source": "synthetic",
        "budget.steps": 10,
        "optim.min_lr": 0.0,
    }
    chosen |= {"data.eod_mask_loss": True} if case["masked"] else {}
    given = [f"{name}={as_yaml(value)}" for name, value in chosen.items()]
    run = config.load(None, given)
    run.plan(size)
    return run, given


def prepared(case: Case, against: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both sides are told, and the tensors that both get; ConfigError if hpclm refuses the case."""
    run, given = loaded(case)
    model, optim = run.model, run.optim
    draw = torch.Generator().manual_seed(case["draw"])
    weights = {name: _weight(name, placement.shape, draw) for name, placement in placements(model).items()}
    request = {
        **case, "words": given, "processes": processes(case), "tensor": run.parallel.tensor, "pipeline": run.parallel.pipeline,
        "loss_norm": run.batch.loss_norm,
        "optim": dict(lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, clip=optim.clip, decayed=optim.decayed),
    }  # fmt: skip
    inputs = {"weights": weights, "batch": [_batch(case, run, draw) for _ in range(case["steps"])]}
    if against == "megatron":
        names = "layers hidden attention.heads attention.groups gated activation norm norm_eps bias attention.qk_norm positions rope.base tied context vocab_size padded_vocab"
        request["model"] = {name: value_at(model, name) for name in names.split()} | {"ffn": model.ffn_width}
        inputs["theirs"] = {theirs: weights[name] for theirs, name in megatron_names(model).items()}
    else:
        family = families.of_network(model)
        if family is custom.FAMILY:
            raise RefusedError("refused by transformers", f"no class: {' | '.join(families.nearest_obstacles(model))}")
        request["theirs"] = {
            **family.described(model),
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tied,
        }
        pairs = ((rule.theirs, rule.split(weights[rule.ours])) for rule in family.rules(model))
        inputs["theirs"] = {
            name: part.contiguous() for names, parts in pairs for name, part in zip(names, parts, strict=True)
        }
    return request, inputs


def megatron_names(model: ModelConfig) -> dict[str, str]:
    """Megatron-core's name of each weight, and hpclm's by its own import."""
    placed = placements(model)
    every = [*OUTSIDE, *(f"decoder.layers.{layer}.{module}" for layer in range(model.layers) for module in MODULES)]
    pairs = {f"{module}.{kind}": ours(f"{module}.{kind}") for module in every for kind in ("weight", "bias")}
    return {theirs: name for theirs, name in pairs.items() if name in placed}


def _weight(name: str, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Large enough that every part of the network matters."""
    gain = "norm" in name and name.endswith("weight")
    return torch.randn(shape, generator=draw) * 0.2 + gain


def rounded(weight: Tensor, draw: torch.Generator) -> Tensor:
    """A weight with one unit in the last place added to, or taken from, each value."""
    up = torch.rand(weight.shape, generator=draw) < 0.5
    return torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf))


def _batch(case: Case, run: RunConfig, draw: torch.Generator) -> list[Tensor | None]:
    """Tokens, labels, mask, positions and document indices: [micro-batches, replicas, B, T] each, or None."""
    shape = case["micro_batches"], case["data"], run.batch.micro_size, run.model.context + 1
    rows = torch.randint(0, run.model.vocab_size, shape, generator=draw)
    mask = torch.rand(rows[..., 1:].shape, generator=draw) >= case["masked"] if case["masked"] else None
    if case["documents"] == "none":
        return [rows[..., :-1], rows[..., 1:], mask, None, None]
    starts = torch.rand(rows[..., 1:].shape, generator=draw) < 0.15
    starts[..., 0] = False
    places = torch.arange(run.model.context).expand(starts.shape)
    begun = places.masked_fill(~starts, 0).cummax(-1).values
    positions = None if case["documents"] == "attention" else places - begun
    documents = None if case["documents"] == "positions" else starts.cumsum(-1)
    return [rows[..., :-1], rows[..., 1:], mask, positions, documents]
