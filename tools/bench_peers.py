"""What bench_train.py times hpclm's step beside, but Megatron-core: plain PyTorch, transformers, and the matrix products and attention alone.

Each takes a model's settings, tokens [A, B, T + 1] of A micro-batches and a type, and gives a function that does one optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # loaded where they are used, so that --help answers at once
    import torch

    from hpclm.config import ModelConfig

Step = Callable[[], object]


def rounds(
    steps: dict[str, Step], count: int, wait: Step, show: bool = True, together: int = 1
) -> dict[str, list[float]]:
    """Seconds of every step, in each of ``count`` rounds, the mean of ``together``; ``wait`` waits for the device."""
    from tqdm import tqdm

    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in tqdm(range(count), desc="rounds", disable=None if show else True):
        for name, step in list(steps.items())[:: -1 if number % 2 else 1]:  # none is always the first
            wait()
            began = time.perf_counter()
            for _ in range(together):
                step()
            wait()
            times[name].append((time.perf_counter() - began) / together)
    return times


def plain(model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype, compiled: bool = False) -> Step:
    """GPT-2 in a page of PyTorch, as people write it by hand: autocast, SDPA, whole logits, fused AdamW, clipping."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    width, heads = model.hidden, model.attention.heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, model.ffn_width), nn.Linear(model.ffn_width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                part.unflatten(2, (heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(model.padded_vocab, width), nn.Embedding(model.context, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(model.layers)))
            self.norm = nn.LayerNorm(width)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
            logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    network = Network().to(rows.device).train()
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return _stepping(network, rows, dtype, torch.compile(network) if compiled else network)


def looping(model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype) -> Step:
    """A Mixtral in a page of PyTorch, with a loop over the experts as people write it by hand; autocast, SDPA, fused AdamW, clipping."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    width, heads, size = model.hidden, model.attention.heads, model.head_width
    turns = 1 / model.rope.base ** (torch.arange(0, size, 2, device=rows.device) / size)
    angles = torch.outer(torch.arange(model.context, device=rows.device), turns).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(width, model.experts.count, bias=False)
            self.up = nn.ModuleList(
                nn.Linear(width, 2 * model.expert_width, bias=False) for _ in range(model.experts.count)
            )
            self.down = nn.ModuleList(
                nn.Linear(model.expert_width, width, bias=False) for _ in range(model.experts.count)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = x.flatten(0, 1)
            weights, chosen = self.router(tokens).float().softmax(-1).topk(model.experts.per_token, -1)
            weights, y = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype), torch.zeros_like(tokens)
            for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
                token, place = torch.where(chosen == number)
                gate, inner = up(tokens[token]).chunk(2, -1)
                y = y.index_add(0, token, (down(F.silu(gate) * inner) * weights[token, place, None]).to(y.dtype))
            return y.view_as(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
            self.experts = Experts()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                part.unflatten(2, (heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
            )
            y = F.scaled_dot_product_attention(turned(q).to(v.dtype), turned(k).to(v.dtype), v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.experts(self.norm2(x))

    torch.manual_seed(0)
    inner = [nn.Embedding(model.padded_vocab, width), *(Block() for _ in range(model.layers)), nn.RMSNorm(width)]
    network = nn.Sequential(*inner, nn.Linear(width, model.padded_vocab, bias=False)).to(rows.device).train()
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return _stepping(
        network, rows, dtype, lambda ids, labels: F.cross_entropy(network(ids).float().flatten(0, 1), labels.flatten())
    )


def transformers(model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype, compiled: bool = False) -> Step:
    """GPT2LMHeadModel, or LlamaForCausalLM for a model with rotary positions, or MixtralForCausalLM with experts; SDPA, autocast, fused
    AdamW, clipping."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    shape: dict[str, Any] = dict(vocab_size=model.padded_vocab, attn_implementation="sdpa", use_cache=False)
    classes: tuple[Any, Any] = (
        (LlamaConfig, LlamaForCausalLM) if model.positions == "rope" else (GPT2Config, GPT2LMHeadModel)
    )
    if model.positions == "rope":
        shape |= dict(
            num_hidden_layers=model.layers,
            hidden_size=model.hidden,
            num_attention_heads=model.attention.heads,
            num_key_value_heads=model.attention.groups,
            intermediate_size=model.expert_width if model.experts.count else model.ffn_width,
            max_position_embeddings=model.context,
            tie_word_embeddings=model.tied,
        )
        if model.experts.count:
            classes = MixtralConfig, MixtralForCausalLM
            shape |= dict(
                num_local_experts=model.experts.count, num_experts_per_tok=model.experts.per_token, head_dim=None
            )
    else:
        shape |= dict(
            n_layer=model.layers, n_embd=model.hidden, n_head=model.attention.heads, n_positions=model.context
        )
        shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    network = classes[1](classes[0](**shape)).to(rows.device).train()

    class WithLoss(nn.Module):
        def __init__(self, forward: Any) -> None:
            super().__init__()
            self.network = forward

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.network(input_ids=ids).logits
            return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return _stepping(network, rows, dtype, WithLoss(torch.compile(network) if compiled else network))


def _stepping(network: torch.nn.Module, rows: torch.Tensor, dtype: torch.dtype, loss_of: Any) -> Step:
    """A step of ``network``, whose loss ``loss_of(ids, labels)`` gives."""
    import torch

    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows]

    def step() -> None:
        for ids, labels in batches:
            with torch.autocast(rows.device.type, dtype, enabled=dtype != torch.float32):
                loss = loss_of(ids, labels) / len(batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def limit(model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype) -> Step:
    """The step's matrix products back to back, and causal attention forward and backward: what no step can be faster than."""
    import torch
    import torch.nn.functional as F

    n, c, f = rows[0, :, 1:].numel(), model.hidden, model.ffn_width
    fused = (model.attention.heads + 2 * model.attention.groups) * model.head_width
    up = 2 * f if model.activation in ("swiglu", "geglu") else f
    draw: dict[str, Any] = dict(device=rows.device, dtype=dtype)
    products = []
    for n_in, n_out, times in (
        (c, fused, model.layers),
        (model.attention.heads * model.head_width, c, model.layers),
        (c, up, model.layers),
        (f, c, model.layers),
        (c, model.padded_vocab, 1),
    ):
        x, w, g = torch.randn(n, n_in, **draw), torch.randn(n_out, n_in, **draw), torch.randn(n, n_out, **draw)
        y, dx, dw = torch.empty_like(g), torch.empty_like(x), torch.empty_like(w)
        products.append((times, ((x, w.t(), y), (g, w, dx), (g.t(), x, dw))))
    count, batch, context = rows.shape[0], rows.shape[1], rows.shape[2] - 1
    shape = (batch, model.attention.heads, context, model.head_width)
    q, k, v = (torch.randn(*shape, **draw, requires_grad=True) for _ in range(3))
    gradient = torch.randn(*shape, **draw)

    def step() -> None:
        for times, group in products:
            for _ in range(times * count):
                for a, b, out in group:
                    torch.mm(a, b, out=out)
        for _ in range(model.layers * count):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(y, (q, k, v), gradient)

    return step
