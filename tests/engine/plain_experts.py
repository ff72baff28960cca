"""A small GPT with experts on one process, from the formulas of its papers, in bare PyTorch and fp64. It shares no code with hpclm; it only
reads a run's settings.

n tokens of the global batch, S sequences of T tokens, C hidden size, E experts, k of them for each token.
"""

import torch
import torch.nn.functional as F


class PlainGPT:
    """Weights by name, and what its layers know of the tokens of the step that they compute."""

    def __init__(self, weights, model):
        """``weights``: by logical name; choice biases, which are moved by no gradient, among them."""
        self.model = model
        self.weights = {
            name: weight.double().requires_grad_("choice_bias" not in name) for name, weight in weights.items()
        }
        self.layers = [number for number in range(model.layers) if f"block{number}.mlp.router.weight" in weights]
        self.load = {number: torch.ones(model.experts.count).double() for number in self.layers}
        """Of the step before, by block: each expert's tokens divided by the mean."""
        self.margin = float("inf")
        """The least by which a score, or the sum of a group's two, was above that of the next which was not chosen."""

    def linear(self, x, name):
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + self.model.norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def attention(self, x, name):
        """[S, T, C] -> [S, T, C]; rotary or learned positions, causal, with grouped queries."""
        model, (sequences, length, hidden) = self.model, x.shape
        groups, width = model.attention.kv_heads or model.attention.heads, hidden // model.attention.heads
        fused = self.linear(x, f"{name}.qkv").view(sequences, length, groups, -1, width).transpose(1, 2)
        q, k, v = fused[..., :-2, :], fused[..., -2, :], fused[..., -1, :]
        if model.positions == "rope":
            rate = model.rope.base ** -(torch.arange(0, width, 2).double() / width)
            angle = torch.arange(length)[:, None] * rate
            turn = torch.polar(torch.ones_like(angle), angle)
            q, k = turned(q, turn[:, None]), turned(k, turn)
        scores = torch.einsum("sgthd,sgud->sghtu", q, k) / width**0.5
        later = torch.ones(length, length).triu(1).bool()
        y = torch.einsum("sghtu,sgud->stghd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        return self.linear(y.reshape(x.shape), f"{name}.out")

    def activated(self, up):
        if self.model.activation == "swiglu":
            gate, up = up.chunk(2, -1)
            return gate * gate.sigmoid() * up
        if self.model.activation == "swiglu_clamped":
            gate, up = up.chunk(2, -1)
            gate = gate.minimum(torch.tensor(7.0))
            return gate * (1.702 * gate).sigmoid() * (up.clip(-7, 7) + 1)
        return F.gelu(up, approximate="tanh")

    def mlp(self, x, name):
        return self.linear(self.activated(self.linear(x, f"{name}.up")), f"{name}.down")

    def choose(self, scores):
        """The experts of one token, by a list of scores."""
        model, experts = self.model, range(len(scores))
        if model.experts.router_groups > 1:
            size = len(scores) // model.experts.router_groups
            best = [sum(sorted(scores[first : first + size])[-2:]) for first in range(0, len(scores), size)]
            ranked = self.ranked(range(len(best)), best, model.experts.router_top_groups)
            experts = [expert for group in ranked for expert in range(group * size, (group + 1) * size)]
        return self.ranked(experts, scores, model.experts.per_token)

    def ranked(self, candidates, scores, count):
        order = sorted(candidates, key=lambda candidate: scores[candidate], reverse=True)
        if count < len(order):
            self.margin = min(self.margin, scores[order[count - 1]] - scores[order[count]])
        return order[:count]

    def experts(self, x, number):
        """[n, C] -> [n, C], and the router's products, scores and choice."""
        model, name = self.model, f"block{number}.mlp"
        products = self.linear(x, f"{name}.router")
        scores = products.softmax(-1) if model.experts.router_score == "softmax" else products.sigmoid()
        by = scores.detach() + self.weights.get(f"{name}.router.choice_bias", torch.zeros(()))
        chosen = [self.choose(of_token) for of_token in by.tolist()]
        y = [torch.zeros_like(token) for token in x]
        for token, choice in enumerate(chosen):
            total = sum(scores[token, expert] for expert in choice) if model.experts.router_normalize else 1.0
            for expert in choice:
                up, down = (self.weights[f"{name}.experts.{which}"][expert] for which in ("up", "down"))
                inner = x[token] @ up.T + self.bias(f"{name}.experts.up_bias", expert)
                result = self.activated(inner) @ down.T + self.bias(f"{name}.experts.down_bias", expert)
                y[token] = y[token] + model.experts.router_scale * scores[token, expert] / total * result
        y = torch.stack(y)
        return (y + self.mlp(x, f"{name}.shared") if model.experts.shared_ffn else y), (products, scores, chosen)

    def bias(self, name, expert):
        return self.weights[name][expert] if name in self.weights else 0.0

    def forward(self, tokens):
        """[S, T] -> [n, vocabulary] logits, and what the routers did, by block."""
        model, routed = self.model, {}
        x = self.weights["tokens.weight"][tokens]
        if model.positions == "learned":
            x = x + self.weights["entry.table"][: tokens.shape[1]]
        for number in range(model.layers):
            x = x + self.attention(self.norm(x, f"block{number}.norm1"), f"block{number}.attention")
            normed = self.norm(x, f"block{number}.norm2")
            if number in self.layers:
                y, routed[number] = self.experts(normed.flatten(0, 1), number)
                x = x + y.view(x.shape)
            else:
                x = x + self.mlp(normed, f"block{number}.mlp")
        output = self.weights["tokens.weight" if model.tied else "output.weight"][: model.vocab_size]
        return self.norm(x, "norm").flatten(0, 1) @ output.T, routed


def turned(x, turn):
    """[..., D] features, of which i and i + D / 2 are a complex number, times ``turn``."""
    first, second = x.chunk(2, -1)
    y = torch.complex(first.contiguous(), second.contiguous()) * turn
    return torch.cat([y.real, y.imag], -1)


def balance_losses(plain, routed, mask, micro_size):
    """The losses of one layer of the global batch and its counts of tokens; ``mask`` [S, T]: tokens that count."""
    model, (products, scores, chosen) = plain.model, routed
    one_hot = torch.zeros_like(scores)
    for token, choice in enumerate(chosen):
        one_hot[token, choice] = 1.0
    shares = scores / scores.sum(-1, keepdim=True)

    def of_part(rows):
        """N / (K T) x the sum over experts of their tokens x their mean share (DeepSeek-V3, equations 17 to 20), of some tokens."""
        count = rows.sum()
        frequency = model.experts.count / model.experts.per_token * one_hot[rows].sum(0) / count
        return (frequency * shares[rows].mean(0)).sum() * count / mask.sum() if count else torch.zeros(()).double()

    index = torch.arange(mask.numel()).view(mask.shape)
    parts = {"balance_loss_sequence": 1, "balance_loss_micro_batch": micro_size}
    losses = {}
    for name, size in parts.items():
        inside = [
            (torch.isin(index, index[first : first + size]) & mask).flatten() for first in range(0, len(mask), size)
        ]
        losses[name] = sum(of_part(rows) for rows in inside)
    rows = mask.flatten()
    losses["router_z_loss"] = products[rows].exp().sum(-1).log().square().mean()
    return losses, shares[rows].mean(0), one_hot[rows].sum(0)


def decays(name, weight):
    """Matrices, and the matrices of experts; no vectors, nor the vectors of experts."""
    return weight.ndim - (".experts." in name) >= (1 if ".experts." in name and "bias" not in name else 2)


def trained(weights, run, batches, rates):
    """Losses, norms, the first step's gradients, balance losses, counts, and all tensors at the end, of training with AdamW.

    ``batches``: of each step [S, T] tokens, labels, and which tokens count. ``rates``: of learning.
    """
    model, optim, plain = run.model, run.optim, PlainGPT(weights, run.model)
    parameters = {name: weight for name, weight in plain.weights.items() if weight.requires_grad}
    groups = [
        {
            "params": [weight for name, weight in parameters.items() if decays(name, weight) is decayed],
            "weight_decay": optim.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=optim.betas, eps=optim.eps)
    coefficients = {
        **{
            "balance_loss_sequence": model.experts.balance_sequence,
            "balance_loss_micro_batch": model.experts.balance_micro_batch,
        },
        **{"balance_loss_step": model.experts.balance_step, "router_z_loss": model.experts.router_z_loss},
    }
    result = {"losses": [], "norms": [], "reports": [], "counts": [], "gradients": {}}
    for (tokens, labels, mask), rate in zip(batches, rates, strict=True):
        logits, routed = plain.forward(tokens)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
        loss = losses[mask.flatten()].mean()
        sums, counts = dict.fromkeys(coefficients, torch.zeros(()).double()), {}
        for number in plain.layers:
            of_layer, shares, counts[number] = balance_losses(plain, routed[number], mask, run.batch.micro_size)
            of_layer["balance_loss_step"] = (plain.load[number] * shares).sum()
            sums = {name: total + of_layer[name] for name, total in sums.items()}
        optimizer.zero_grad()
        (loss + sum(coefficients[name] * total for name, total in sums.items())).backward()
        gradients = {name: weight.grad.clone() for name, weight in parameters.items()}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        for weight in parameters.values():
            weight.grad *= min(1.0, optim.clip / (norm.item() + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for number, count in counts.items():
            plain.load[number] = count / count.mean()
            if model.experts.balance_bias:
                plain.weights[f"block{number}.mlp.router.choice_bias"] += (
                    model.experts.balance_bias * (count.mean() - count).sign()
                )
        result["losses"].append(loss.item())
        result["norms"].append(norm.item())
        result["reports"].append({name: total.item() for name, total in sums.items() if coefficients[name]})
        result["counts"].append([count.long().tolist() for count in counts.values()])
        result["gradients"] = result["gradients"] or gradients
    result["tensors"] = {f"model.{name}": weight.detach() for name, weight in plain.weights.items()}
    for name, weight in parameters.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            result["tensors"][f"optim.{moment}.{name}"] = optimizer.state[weight][moment]
    return {**result, "margin": plain.margin, "load": [load.tolist() for load in plain.load.values()]}
