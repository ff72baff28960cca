"""Parameters of a model, FLOPs per token, and how many logits are in memory at a time. Needs no PyTorch."""

from hpclm.config import ModelConfig

CHUNK = 4096
"""Tokens whose logits any GPU computes at a time: enough for fast matrix products."""
ROOM = 4 << 30
"""Bytes for logits and what the loss makes of them on a large GPU: fewer chunks add to the gradient of the embedding less often."""
LARGE_GPU_BYTES = 60 << 30
"""Bytes of memory of a large GPU. It is a threshold, not a fraction, so that GPUs of one kind choose alike."""
PER_LOGIT = 8
"""Bytes: in 16 bits a logit, its log-probability in fp32, and its gradient."""


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
    c, f, (qkv, out, mlp) = config.hidden, config.ffn_width, config.biases
    fused = (config.heads + 2 * config.groups) * config.head_width
    up = f * (1 + config.gated)
    attention = (c + qkv) * fused + (config.attention_width + out) * c + config.heads * config.attention_sinks
    shaped = 2 * (config.activation == "xielu")
    spans = config.qk_norm_span == "projection" and config.qk_norm
    split = (config.heads + config.groups) * config.head_width * spans
    return _norms(config) + split + attention + (c + mlp) * up + f * c + mlp * c + shaped


def _norms(config: ModelConfig) -> int:
    """Parameters of a block's norms that no rank of tensor parallelism has only a part of."""
    of_heads = config.qk_norm and config.qk_norm_span == "head"
    heads = config.head_width * (norm(config) // config.hidden) * 2 * of_heads
    return heads + norm(config) * (4 if config.norm_order == "sandwich" else 2)


def unsplit(config: ModelConfig, blocks: int, first: bool, last: bool) -> int:
    """Parameters of a pipeline stage that every tensor-parallel rank holds whole: norms, positions, biases of row-parallel layers."""
    _, out, mlp = config.biases
    per_block = _norms(config) + config.hidden * (out + mlp) + 2 * (config.activation == "xielu")
    before = embedding(config) - config.padded_vocab * config.hidden
    return blocks * per_block + first * before + last * norm(config)


def attended(config: ModelConfig, causal: bool = True) -> float:
    """Tokens that a token attends to, on average over the sequence and the layers; not ``causal``: as if each saw all that any does."""
    context = config.context
    spans = [min(config.window_of(config.kind(i)) or context, context) for i in range(config.layers)]
    return sum(span - causal * span**2 / (2 * context) for span in spans) / len(spans)


def flops_per_token(config: ModelConfig, causal: bool = True) -> float:
    """Floating-point operations of one token's forward and backward pass, without recomputation.

    Matrix products cost 6 per weight and token (Kaplan et al. 2020); attention 12 x layers x hidden x context (Chowdhery et
    al. 2022, appendix B), halved by the causal mask, and less with windows. The embedding counts once, as the output projection.
    """
    c = config.hidden
    projections = c * 2 * (config.attention_width + config.groups * config.head_width)
    mlp = c * config.ffn_width * (2 + config.gated)
    attention = 12 * attended(config, causal) * config.attention_width
    return config.layers * (6 * (projections + mlp) + attention) + 6 * c * config.padded_vocab


def recompute_flops(config: ModelConfig, recompute: str) -> float:
    """FLOPs per token that ``engine.recompute`` adds: the forward pass of the blocks, or of the attention core."""
    if recompute == "full":
        return (flops_per_token(config) - 6 * config.hidden * config.padded_vocab) / 3
    return config.layers * 2 * config.context * config.attention_width if recompute == "selective" else 0.0


def loss_chunk(tokens: int, vocab: int, memory: float) -> int:
    """Tokens of a micro-batch of ``tokens`` whose logits are computed at a time, without engine.loss_chunk, on a GPU with ``memory`` bytes, which has ``vocab`` entries of
    the vocabulary: equal chunks if possible, so that compiled code sees one shape."""
    # by a threshold: a fraction of the memory would give two GPUs of one kind other chunks, and so other sums
    room = ROOM if memory >= LARGE_GPU_BYTES else 0
    largest = max(CHUNK, room // (PER_LOGIT * vocab))
    fewest = max(1, -(-tokens // largest))
    count = next((parts for parts in range(fewest, 2 * fewest) if tokens % parts == 0), fewest)
    return -(-tokens // count)
