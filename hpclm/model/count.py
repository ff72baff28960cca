"""How large a model is and how much arithmetic a token costs."""

from hpclm.config import ModelConfig


def parameters(config: ModelConfig) -> int:
    """Weights of the model, the padding of the token table included."""
    output = 0 if config.tied else config.padded_vocab * config.hidden
    return entry(config) + config.layers * block(config) + norm(config) + output


def norm(config: ModelConfig) -> int:
    """Weights of one norm over the hidden width."""
    return config.hidden * (1 + (config.bias and config.norm == "layernorm"))


def entry(config: ModelConfig) -> int:
    """Weights before the first block: token table, learned positions, the embedding's norm."""
    positions = config.context * (config.positions == "learned")
    return (config.padded_vocab + positions) * config.hidden + norm(config) * config.embed_norm


def block(config: ModelConfig) -> int:
    """Weights of one block."""
    c, f, bias = config.hidden, config.ffn_width, int(config.bias)
    fused = (config.heads + 2 * config.groups) * config.head_width
    head_norm = config.head_width * (norm(config) // c) * 2 * config.qk_norm
    up = f * (1 + config.gated)
    return 2 * norm(config) + head_norm + (c + bias) * fused + (c + bias) * c + (c + bias) * up + f * c + bias * c


def flops_per_token(config: ModelConfig, causal: bool = True) -> float:
    """Floating-point operations of one token's forward and backward pass: the model's own, recomputation not counted.

    Matrix products cost 6 a weight and token (Kaplan et al. 2020); attention 12 x layers x hidden x context (Chowdhery et
    al. 2022, appendix B), of which the causal mask leaves half. The token table counts once, as the output projection.
    """
    c = config.hidden
    projections = c * (2 * c + 2 * config.groups * config.head_width)
    mlp = c * config.ffn_width * (2 + config.gated)
    attention = (6 if causal else 12) * config.context * c
    return config.layers * (6 * (projections + mlp) + attention) + 6 * c * config.padded_vocab


def flops_again(config: ModelConfig, recompute: str) -> float:
    """What ``engine.recompute`` adds to a token: a third of the blocks' (their forward pass), or attention's core."""
    if recompute == "full":
        return (flops_per_token(config) - 6 * config.hidden * config.padded_vocab) / 3
    return config.layers * 2 * config.context * config.hidden if recompute == "selective" else 0.0
