"""Parameters of a model, and FLOPs per token."""

from hpclm.config import ModelConfig


def parameters(config: ModelConfig) -> int:
    """Parameters of the model, including the padding of the embedding."""
    output = 0 if config.tied else config.padded_vocab * config.hidden
    return embedding(config) + config.layers * block(config) + norm(config) + output


def norm(config: ModelConfig) -> int:
    """Parameters of one norm over the hidden size."""
    return config.hidden * (1 + (config.bias and config.norm == "layernorm"))


def embedding(config: ModelConfig) -> int:
    """Parameters before the first block: token embedding, learned positions, embedding norm."""
    positions = config.context * (config.positions == "learned")
    return (config.padded_vocab + positions) * config.hidden + norm(config) * config.embed_norm


def block(config: ModelConfig) -> int:
    """Parameters of one block."""
    c, f, bias = config.hidden, config.ffn_width, int(config.bias)
    fused = (config.heads + 2 * config.groups) * config.head_width
    head_norm = config.head_width * (norm(config) // c) * 2 * config.qk_norm
    up = f * (1 + config.gated)
    return 2 * norm(config) + head_norm + (c + bias) * fused + (c + bias) * c + (c + bias) * up + f * c + bias * c


def unsplit(config: ModelConfig, blocks: int, first: bool, last: bool) -> int:
    """Parameters of a pipeline stage that every tensor-parallel rank holds whole: norms, positions, biases of row-parallel layers."""
    head_norm = config.head_width * (norm(config) // config.hidden) * 2 * config.qk_norm
    each = 2 * norm(config) + head_norm + 2 * config.hidden * config.bias
    before = embedding(config) - config.padded_vocab * config.hidden
    return blocks * each + first * before + last * norm(config)


def flops_per_token(config: ModelConfig, causal: bool = True) -> float:
    """Floating-point operations of one token's forward and backward pass, without recomputation.

    Matrix products cost 6 per weight and token (Kaplan et al. 2020); attention 12 x layers x hidden x context (Chowdhery et
    al. 2022, appendix B), halved by the causal mask. The embedding counts once, as the output projection.
    """
    c = config.hidden
    projections = c * (2 * c + 2 * config.groups * config.head_width)
    mlp = c * config.ffn_width * (2 + config.gated)
    attention = (6 if causal else 12) * config.context * c
    return config.layers * (6 * (projections + mlp) + attention) + 6 * c * config.padded_vocab


def recompute_flops(config: ModelConfig, recompute: str) -> float:
    """FLOPs per token that ``engine.recompute`` adds: the forward pass of the blocks, or of the attention core."""
    if recompute == "full":
        return (flops_per_token(config) - 6 * config.hidden * config.padded_vocab) / 3
    return config.layers * 2 * config.context * config.hidden if recompute == "selective" else 0.0
