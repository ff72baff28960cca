"""Parameters of a model, FLOPs per token, and the number of logits in memory at a time. Needs no PyTorch."""

from hpclm.config import ModelConfig, fp8

CHUNK = 4096
"""Smallest number of tokens in a chunk of logits on a GPU: enough for fast matrix products."""
ROOM = 4 << 30
"""Bytes for logits and their intermediates on a large GPU. Fewer chunks accumulate into the embedding's gradient less often."""
LARGE_GPU_BYTES = 60 << 30
"""Bytes of memory of a large GPU. A threshold, not a fraction, so that GPUs of the same model choose equally."""
PER_LOGIT = 8
"""Bytes per logit: a 16-bit logit, its log-probability in fp32, and its gradient."""


def parameters(config: ModelConfig) -> int:
    """Parameters of the model, including the padding of the embedding."""
    with_experts = config.layers - config.dense_layers
    blocks = config.dense_layers * block(config) + with_experts * block(config, True)
    count = embedding(config) + blocks + norm(config)
    if not config.tied:
        count += config.padded_vocab * config.hidden
    return count


def active_parameters(config: ModelConfig) -> int:
    """Parameters that compute any one token: of the experts, only model.experts.per_token in each layer."""
    idle = (config.layers - config.dense_layers) * (experts(config) - chosen(config))
    return parameters(config) - idle


def described_size(config: ModelConfig) -> str:
    """The number of parameters for messages; with experts also the number of active parameters."""
    text = f"{parameters(config):,} parameters"
    if config.experts.count:
        text += f" ({active_parameters(config):,} active for each token)"
    return text


def norm(config: ModelConfig) -> int:
    """Parameters of one norm over the hidden size."""
    has_bias = config.bias and config.norm == "layernorm"
    return config.hidden * (1 + has_bias)


def embedding(config: ModelConfig) -> int:
    """Parameters before the first block: token embedding, learned positions, embedding norm."""
    count = config.padded_vocab * config.hidden
    if config.positions == "learned":
        count += config.context * config.hidden
    if config.embed_norm:
        count += norm(config)
    return count


def block(config: ModelConfig, with_experts: bool = False) -> int:
    """Parameters of one block with a dense MLP or with experts."""
    c = config.hidden
    (qkv, out, _) = config.biases
    fused = (config.attention.heads + 2 * config.attention.groups) * config.head_width
    attention = (c + qkv) * fused + (config.attention_width + out) * c
    if config.attention.sinks:
        attention += config.attention.heads
    if config.attention.qk_norm and config.attention.qk_norm_span == "projection":
        attention += (config.attention.heads + config.attention.groups) * config.head_width
    if not with_experts:
        return _norms(config) + attention + _mlp(config, config.ffn_width) + _activation(config)
    mlp = _router(config) + experts(config)
    if config.experts.shared_ffn:
        mlp += _mlp(config, config.experts.shared_ffn)
    return _norms(config) + attention + mlp


def _activation(config: ModelConfig) -> int:
    """Weights of a dense MLP's activation function."""
    return 2 if config.activation == "xielu" else 0


def active_block(config: ModelConfig, with_experts: bool = False) -> int:
    """Parameters of one block that compute any one token."""
    idle = experts(config) - chosen(config) if with_experts else 0
    return block(config, with_experts) - idle


def experts(config: ModelConfig) -> int:
    """Parameters of all experts of one block with experts, without the router."""
    return config.experts.count * _mlp(config, config.expert_width)


def chosen(config: ModelConfig) -> int:
    """Parameters of the experts of one block that compute one token."""
    return config.experts.per_token * _mlp(config, config.expert_width)


def _mlp(config: ModelConfig, width: int) -> int:
    """Parameters of an MLP of this inner width."""
    bias = config.biases[2]
    return (config.hidden + bias) * width * (1 + config.gated) + (width + bias) * config.hidden


def _router(config: ModelConfig) -> int:
    """Parameters of a router, without the bias on its choice, which no gradient moves."""
    return config.experts.count * (config.hidden + config.experts.router_bias)


def _norms(config: ModelConfig) -> int:
    """Parameters of a block's norms that every tensor-parallel rank holds whole."""
    count = norm(config) * (4 if config.norm_order == "sandwich" else 2)
    if config.attention.qk_norm and config.attention.qk_norm_span == "head":
        count += 2 * config.head_width * (norm(config) // config.hidden)
    return count


def linears(config: ModelConfig, with_experts: bool = False) -> list[tuple[int, int]]:
    """Inputs and outputs of each linear layer of one block; excludes experts and their router."""
    c = config.hidden
    inner = config.experts.shared_ffn if with_experts else config.ffn_width
    attention = [
        (c, (config.attention.heads + 2 * config.attention.groups) * config.head_width),
        (config.attention_width, c),
    ]
    if not inner:
        return attention
    return [*attention, (c, inner * (1 + config.gated)), (inner, c)]


def fp8_gain(config: ModelConfig) -> float:
    """Upper bound on the speed-up of the FLOPs of ``flops_per_token`` with engine.fp8 over bf16: products for outputs and for gradients
    of inputs, in FP8, take half as long."""
    weights = sum(a * b for layer in fp8.blocks(config) for a, b in linears(config, config.experts.in_layer(layer)))
    return 1 / (1 - 4 * weights / flops_per_token(config) / 2)


def unsplit(config: ModelConfig, blocks: int, first: bool, last: bool, with_experts: int = 0) -> int:
    """Parameters of a pipeline stage, without those of experts, that every tensor-parallel rank holds whole: norms, positions, routers,
    biases of row-parallel layers. ``with_experts``: how many of its ``blocks`` have experts."""
    _, out, mlp = config.biases
    per_block = _norms(config) + config.hidden * out
    dense = config.hidden * mlp + _activation(config)
    routed = _router(config) + config.hidden * mlp * (config.experts.shared_ffn > 0)
    before = embedding(config) - config.padded_vocab * config.hidden
    mlps = (blocks - with_experts) * dense + with_experts * routed
    return blocks * per_block + mlps + first * before + last * norm(config)


def unsplit_experts(config: ModelConfig) -> int:
    """Parameters of one block's experts that stay whole when experts are split over tensor parallelism: the second bias."""
    return config.experts.count * config.hidden * config.biases[2]


def attended(config: ModelConfig, causal: bool = True) -> float:
    """Mean number of tokens that a token attends to. Without ``causal``, every token counts as many as the last one."""
    context = config.context
    spans = [
        min(config.attention.window_of(config.attention.kind(i)) or context, context) for i in range(config.layers)
    ]
    return sum(span - causal * span**2 / (2 * context) for span in spans) / len(spans)


def flops_per_token(config: ModelConfig, causal: bool = True) -> float:
    """Floating-point operations of one token's forward and backward pass, without recomputation.

    Matrix products cost 6 per weight and token (Kaplan et al. 2020); attention 12 x layers x hidden x context (Chowdhery et al. 2022,
    appendix B), halved by the causal mask, and less with windows. The embedding counts once, as the output projection. Of the experts,
    only those that compute the token count.
    """
    c = config.hidden
    dense = config.dense_layers
    projections = c * 2 * (config.attention_width + config.attention.groups * config.head_width)
    routed = config.experts.per_token * config.expert_width + config.experts.shared_ffn
    mlp = c * (2 + config.gated)
    attention = 12 * attended(config, causal) * config.attention_width
    mlps = dense * 6 * mlp * config.ffn_width + (config.layers - dense) * 6 * (mlp * routed + c * config.experts.count)
    return config.layers * (6 * projections + attention) + mlps + 6 * c * config.padded_vocab


def recompute_flops(config: ModelConfig, recompute: str) -> float:
    """FLOPs per token that ``engine.recompute`` adds: the forward pass of the blocks, or of the attention core."""
    if recompute == "full":
        return (flops_per_token(config) - 6 * config.hidden * config.padded_vocab) / 3
    if recompute == "selective":
        return config.layers * 2 * config.context * config.attention_width
    return 0.0


def loss_chunk(tokens: int, vocab: int, memory: float) -> int:
    """The default number of tokens in a chunk of logits. ``tokens``: of the micro-batch. ``vocab``: size of the vocabulary.
    ``memory``: bytes of the GPU. Chunks are equal if possible, so that compiled code sees one shape."""
    # a threshold: with a fraction of the memory, two GPUs of the same model could add up different chunks
    room = ROOM if memory >= LARGE_GPU_BYTES else 0
    largest = max(CHUNK, room // (PER_LOGIT * vocab))
    fewest = max(1, -(-tokens // largest))
    count = next((parts for parts in range(fewest, 2 * fewest) if tokens % parts == 0), fewest)
    return -(-tokens // count)
