"""How large a model is and how much arithmetic a token costs."""

from hpclm.config import ModelConfig


def parameters(config: ModelConfig) -> int:
    """Weights of the model, the padding of the token table included."""
    c, f = config.hidden, config.ffn_width
    fused = (config.heads + 2 * config.groups) * config.head_width
    bias = int(config.bias)
    norm = c * (1 + (bias and config.norm == "layernorm"))
    head_norm = config.head_width * (norm // c) * 2 * config.qk_norm
    gate = 1 + config.gated
    block = 2 * norm + head_norm + (c + bias) * fused + (c + bias) * c + (c + bias) * f * gate + f * c + bias * c
    tables = config.padded_vocab * c * (1 if config.tied else 2)
    positions = config.context * c * (config.positions == "learned")
    return tables + positions + norm * config.embed_norm + config.layers * block + norm


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
